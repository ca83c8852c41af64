"""`kvq bench`: its subcommands."""

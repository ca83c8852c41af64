"""`kvq chat`: conversations in the terminal."""

"""Description of a checkpoint: its folder, configuration, stored weights and the modules of its text part."""

"""A fleet of engines under a load to come: the real scheduler and blocks, steps that take modelled time."""

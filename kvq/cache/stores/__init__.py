"""Layer stores: the K and V of one layer, a module for each form in which they are kept."""

"""Layer stores: the K and V of one layer, with one module per storage form."""

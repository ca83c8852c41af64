"""Sizing of a model as the engine lays it out: parameters, stored weights, memory, block pools."""

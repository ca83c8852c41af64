"""Sizing of a model as the engine lays it out: parameters, types of weights, memory, block pools."""

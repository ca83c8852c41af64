"""Sizing of a model as laid out by the engine: parameters, stored weights, memory and block pools."""

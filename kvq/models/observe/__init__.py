"""Geometry of models whose family is on no list, found by running a tiny copy of their code."""

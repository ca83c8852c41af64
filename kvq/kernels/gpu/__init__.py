"""Shared code of the Triton kernels: reading formats, the rotation, and the table of tile shapes."""

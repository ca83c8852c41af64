"""What the Triton kernels share: reading formats, the rotation, and the table of tile shapes."""

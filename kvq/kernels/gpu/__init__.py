"""Code shared by the Triton kernels: reading formats, the rotation, and the table of tile shapes."""

"""The C++ kernels for CPUs: one library, loaded once, and what it is called with."""

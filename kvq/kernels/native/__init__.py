"""The C++ kernels for CPUs: one library, loaded once, and its arguments."""

"""C++ kernels for CPUs: the library, which is loaded once, and the arguments of its functions."""

"""What compiled kernels ask of a GPU that is not there: instructions, registers, memory, copies under way."""

"""A GPU seen without one: bytes, sectors, launches and instructions, counted from Triton's kernels and compilers."""

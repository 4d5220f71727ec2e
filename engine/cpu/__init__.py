"""LLVM vectors in numba functions, and the threads that compiled attention and layers run on."""

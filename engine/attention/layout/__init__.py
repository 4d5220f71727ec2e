"""The work of one pass for the Triton kernels, laid out by compiled code."""

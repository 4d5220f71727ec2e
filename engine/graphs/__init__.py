"""CUDA graphs: capture, static tensors and replay."""

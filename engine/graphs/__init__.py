"""CUDA graphs: capture, static tensors, replay."""

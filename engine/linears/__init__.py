"""Linear layers on a CPU: the fastest product that PyTorch has for each shape of weight."""

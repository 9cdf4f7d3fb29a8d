"""Triton kernels, one operation a file, each beside its plain-torch reference. Knows tensors and nothing else."""

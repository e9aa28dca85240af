"""Kernels of the learner, one file each. Only files named so use Triton; each kernel has a plain PyTorch version."""

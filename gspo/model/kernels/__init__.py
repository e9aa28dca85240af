"""Kernels of the learner: one file per kernel. Triton is used only in files of that name, each with a plain PyTorch
version."""

"""Kernels of the learner: one file per kernel, Triton only in files of that name, each with a plain torch twin."""

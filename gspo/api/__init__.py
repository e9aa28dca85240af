"""The Python API: `gspo.train` and its relatives, for scripts and notebooks.

In: Python objects (a model, rows, reward functions) and settings as keyword arguments. Out: the same `Config`, the same
training loop and the same run directory as on the command line. Invariant: nothing can be set here that a recipe cannot
express, except objects, which are written into the run directory first, and functions and callbacks.
"""

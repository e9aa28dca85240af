"""Rewards to advantages, and tokens to a loss. `table.py` is the place to start."""

"""Rewards to advantages, and tokens to a loss. Start with `table.py`."""

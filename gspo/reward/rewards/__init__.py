"""Reward functions, one file each, found by name."""

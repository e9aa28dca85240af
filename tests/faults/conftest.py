"""Fixtures shared with other folders."""

from pools import children, group, make_pool, reward_file

__all__ = ["children", "group", "make_pool", "reward_file"]

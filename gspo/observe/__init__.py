"""Beside the line, never in it: what a run writes down and how it is shown."""

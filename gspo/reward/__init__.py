"""Scores, from functions that run in worker processes."""

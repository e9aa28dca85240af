"""`gspo replay`: recompute a step of a run and compare objectives on its batch. `replay.py` is the entry point."""

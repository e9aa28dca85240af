"""The checkpoints of a run: when one is saved, what a resume may not change, and rolling a run back to one."""

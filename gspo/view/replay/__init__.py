"""What every objective would have done with a step that a run has taken. `replay.py` is the place to start."""

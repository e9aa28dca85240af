"""What a run writes: the run directory, metrics, incidents, sinks, progress. Nothing here changes what is trained."""

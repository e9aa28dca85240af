"""What a run writes: the run directory, metrics, alarms, sinks, progress. Nothing here changes what is trained."""

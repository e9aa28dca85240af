"""What reads a run directory: curves, diagnosis, the dashboard, reports, comparisons, replay."""

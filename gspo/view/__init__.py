"""Everything that reads run directories: curves, diagnosis, dashboard, reports, comparisons and replay."""

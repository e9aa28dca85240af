"""A run on a Ray cluster: Ray places the processes of a run, and notices when one of their machines is gone."""

"""Generated tasks with verifiers, one file each, found by name."""

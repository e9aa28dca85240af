"""Stage 2: an engine samples completions from the current policy."""

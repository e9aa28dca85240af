"""An engine samples completions from the current policy."""

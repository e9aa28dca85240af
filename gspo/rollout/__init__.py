"""Stage 2: replies, drawn from the current policy by an engine."""

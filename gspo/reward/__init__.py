"""Stage 3: scores, from functions that run in worker processes."""

"""The processes of a run: what they exchange, how they start, and what happens if one of them fails."""

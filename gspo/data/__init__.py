"""Stage 1: problems from files, the hub or generators, as prompts in a seeded order."""

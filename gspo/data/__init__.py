"""Stage 1: problems from files, hubs or generators, as prompts in a seeded order."""

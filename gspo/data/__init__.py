"""Problems from files, the hub or generators, as prompts in a seeded order."""

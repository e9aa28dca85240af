"""What the settings of other trainers (TRL, verl) are called here, and how their configs become recipes.

In: names and values of their settings. Out: our settings by dotted key, where the meaning differs, and what has no
equivalent. Invariant: one table per trainer. Error messages, `gspo import-config`, `gspo.trl` and the documentation
read it, so they cannot contradict each other.
"""

"""The sub-commands of `gspo`: one module per command, each with its arguments and its `run`."""

"""The built-in environments: one file each, with a class `ENVIRONMENT`, found by the name of the file."""

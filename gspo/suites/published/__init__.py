"""One file per benchmark. Each defines `SUITE`; docs/evaluation.md has a table of all protocols."""

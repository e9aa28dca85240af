"""`gspo compare`: several objectives on one recipe, at equal sampled tokens, from the same cold start, with a report.

Running: `arms.py` parses the arms, `plan.py` turns them into runs and tracks their progress, `launch.py` runs them as
processes, `record.py` stores the comparison, `comparison.py` is the entry point.
Reporting reads run directories only, imports no torch and is reused by other reports: `curves.py` and `spread.py` read,
`table.py` aggregates, `figures.py` plots, `sentences.py` and `rows.py` produce text, `report.py` and `page.html`
render.
"""

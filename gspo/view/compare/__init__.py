"""`gspo compare`: several objectives on one recipe, at equal sampled tokens, from the same cold start, with a report.

`arms.py` reads what to compare, `plan.py` says which runs that makes and how far each is, `launch.py` runs them as
processes, `record.py` remembers, `comparison.py` does it all in order. The rest reads run directories and nothing else,
imports no torch and serves any other report: `curves.py` and `spread.py` read, `table.py` counts, `figures.py` draws,
`sentences.py` and `rows.py` put into words, `report.py` and `page.html` show.
"""

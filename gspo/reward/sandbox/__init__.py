"""Model-written programs, run where they can do no harm and judged where they cannot reach.

`probe` finds the strongest sandbox of this machine, `box` owns one process in it, `suite` reads a row's tests, `grade`
brings program and tests together. `inside` is what runs in there.
"""

"""Code that runs inside the sandbox: plain Python 3.8 with the standard library only, sent there as compiled code.

`confine` restricts the process, `candidate` runs the program, `judge` runs the tests and `tally` counts their asserts.
`link` forwards the tests' questions to the program, and `remote` defines proxies for the program's objects. Both sides
exchange the typed JSON of `values`. No process holds both the program and the expected values.
"""

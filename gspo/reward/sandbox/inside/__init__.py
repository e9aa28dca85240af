"""What runs inside the sandbox: plain Python 3.8 and the standard library, sent there as compiled code.

`confine` closes the door behind itself, `candidate` runs the program, `judge` runs the tests and `tally` counts their
asserts. `link` carries the tests' questions, and `remote` stands for the program's objects. Both sides talk in the
typed JSON of `values`. Nothing here knows both the program and the expected values.
"""

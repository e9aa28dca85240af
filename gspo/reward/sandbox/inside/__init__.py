"""What runs inside the sandbox: plain Python 3.8 and the standard library, sent there as compiled code.

`confine` closes the door behind itself, `candidate` runs the program, `judge` runs the tests. They talk in the typed
JSON of `values`. Nothing here knows both the program and the expected values.
"""

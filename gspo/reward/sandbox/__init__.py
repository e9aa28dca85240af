"""Run model-written programs in one sandboxed process and their tests in another.

`probe` finds the strongest sandbox this machine supports, `box` owns one sandboxed process, `suite` parses a row's
tests, and `grade` runs a program against them. `inside` holds the code that runs inside the sandbox.
"""

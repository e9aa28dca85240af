"""`python -m gspo` is the `gspo` command."""

import sys

from gspo.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m coldpress`: the command `coldpress`."""

import sys

from coldpress.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m coldpress.runtime`: the command `coldpress-run`."""

import sys

from coldpress.runtime.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

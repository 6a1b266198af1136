"""`python -m coldpress.server ARTIFACT`."""

import sys

from coldpress.server.command import main

sys.exit(main())

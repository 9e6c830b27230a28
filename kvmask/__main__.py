"""`python -m kvmask`: the `kvmask` command."""

import sys

from kvmask.cli import main

sys.exit(main())

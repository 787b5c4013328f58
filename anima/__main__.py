"""`python -m anima`."""

import sys

from .cli import main

sys.exit(main())

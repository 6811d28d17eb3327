"""``python -m fp4``: the same as the ``fp4`` command."""

import sys

from fp4.cli import main

if __name__ == "__main__":
    sys.exit(main())

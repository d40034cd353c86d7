"""`python -m holdfast` is `holdfast`."""

from __future__ import annotations

import sys

from holdfast.cli import main

if __name__ == "__main__":
    sys.exit(main())

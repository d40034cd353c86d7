"""`python -m holdfast` is `holdfast`."""

from __future__ import annotations

from holdfast.cli import entry

if __name__ == "__main__":
    entry()

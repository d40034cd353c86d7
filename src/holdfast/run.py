"""`python -m holdfast.run` is `holdfast run`, as `python -m torch.distributed.run` is torchrun."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from holdfast.cli import leave
from holdfast.cli import main as holdfast_main

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Run `holdfast run` with these arguments, `sys.argv[1:]` when none are given; returns the exit status."""
    return holdfast_main(["run", *(sys.argv[1:] if args is None else args)])


if __name__ == "__main__":
    leave(main())

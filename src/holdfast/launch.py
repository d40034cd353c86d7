"""`python -m holdfast.launch` is `holdfast launch`, as `python -m torch.distributed.launch` is torch's.

The package has a function of the same name, `holdfast.launch(fn, ...)`, so this module can be called too.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from holdfast.cli import leave
from holdfast.cli import main as holdfast_main

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Run `holdfast launch` with these arguments, `sys.argv[1:]` when none are given; returns the exit status."""
    return holdfast_main(["launch", *(sys.argv[1:] if args is None else args)])


class _Launch(ModuleType):
    """This module, callable: importing it replaces the function of the same name in the package."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from holdfast.launching.api import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Launch

if __name__ == "__main__":
    leave(main())

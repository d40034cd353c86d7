"""`holdfast launch`: torch.distributed.launch, for scripts that want a --local-rank argument.

The same as `holdfast run` but for that argument, `--use-env`, and a line that says it is deprecated.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from holdfast.cli import config, grammar
from holdfast.cli.options import LAUNCH_OPTIONS
from holdfast.cli.run import execute, tell_about

if TYPE_CHECKING:
    from collections.abc import Sequence

WARNING = (
    "FutureWarning: `launch` is deprecated, as torch.distributed.launch is; "
    "use `holdfast run` and read LOCAL_RANK from the environment"
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises HoldfastError."""
    parsed = grammar.parse(argv, os.environ, LAUNCH_OPTIONS, configure=config.configure)
    if any(getattr(parsed.values, dest) for dest in grammar.ABOUT_US):
        return tell_about(parsed, "launch", LAUNCH_OPTIONS)
    print(f"holdfast: {WARNING}", file=sys.stderr)
    return execute(parsed, "launch", argv)

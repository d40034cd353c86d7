"""What the far side of `holdfast run --hosts` runs: the agent as it is anywhere, but how it ended is told to the
launcher, which shows it once for all hosts. Not for typing.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from holdfast.cli import grammar
from holdfast.cli.options import LAUNCH_OPTIONS, OPTIONS
from holdfast.cli.run import start

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.runtime.agent_service import Finished

TEXT_CHARACTERS_MAX = 12_000
"""The launcher's side reads the report in one piece, from a pipe."""


def main(argv: Sequence[str]) -> int:
    """`FD run|launch [options] script ...`: FD takes the report. Returns the exit status. Raises HoldfastError."""
    tells, table = int(argv[0]), LAUNCH_OPTIONS if argv[1] == "launch" else OPTIONS
    parsed = grammar.parse(argv[2:], {}, table)  # the launcher has read all variables

    def show(finished: Finished) -> str:
        from holdfast.insight.screen import render

        text = render(finished.outcome, finished.folder)[-TEXT_CHARACTERS_MAX:]
        report = json.dumps({"kind": finished.outcome.kind.value, "text": text})
        os.write(tells, report.encode())
        return ""

    os.set_inheritable(tells, False)
    return start(parsed, show=show, say_notices=False)

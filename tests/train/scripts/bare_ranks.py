"""Runs cases of group_cases.py on two ranks without a launcher: bare_ranks.py CASE …

For each case a line of JSON: {"case", "codes", "told"}, see forked.py.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import group_cases
from forked import run_ranks


def run(case: str) -> None:
    with tempfile.TemporaryFile("w+") as output:

        def rank() -> None:
            os.dup2(output.fileno(), 1)
            getattr(group_cases, case)()

        codes = run_ranks(2, rank)
        output.seek(0)
        told = [json.loads(line) for line in output.read().splitlines()]
    sys.stdout.write(json.dumps({"case": case, "codes": codes, "told": told}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for each in sys.argv[1:]:
        run(each)

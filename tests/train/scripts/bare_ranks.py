"""Runs cases of group_cases.py on two ranks without a launcher: bare_ranks.py CASE …

For each case a line of JSON: {"case", "codes", "told"}, see forked.py.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import group_cases
import torch.distributed as dist
from forked import run_ranks


def kept_store() -> None:
    """Two lives with one store, that an agent has: torchrun's on several nodes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GROUP_WORLD_SIZE="2")
    for _ in range(2):
        run("meets_in_a_kept_store", port=store.port)


def run(case: str, port: int = 0) -> None:
    with tempfile.TemporaryFile("w+") as output:

        def rank() -> None:
            if port:
                os.environ["MASTER_PORT"] = str(port)
            os.dup2(output.fileno(), 1)
            getattr(group_cases, case)()

        codes = run_ranks(2, rank)
        output.seek(0)
        told = [json.loads(line) for line in output.read().splitlines()]
    sys.stdout.write(json.dumps({"case": case, "codes": codes, "told": told}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for each in sys.argv[1:]:
        kept_store() if each == "kept_store" else run(each)

"""A script as it is, on forked ranks without a launcher, once or several times; what each run prints ends with a form feed.

on_ranks.py MODULES RUN [-- RUN …]     RUN: WORLD SCRIPT ARGUMENTS; a world of 0 is one plain process

MODULES, separated by commas, are imported once for all; they may lie beside the first script.
"""

from __future__ import annotations

import importlib
import io
import os
import runpy
import sys
from functools import partial
from itertools import groupby
from pathlib import Path

import torch.multiprocessing
from forked import run_ranks

# What spawns imports everything again in each rank.
torch.multiprocessing.spawn = partial(torch.multiprocessing.start_processes, start_method="fork")


def run(script: str, arguments: list[str], plain: bool) -> None:
    if plain:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(write_through=False)  # else a line and its end are written separately
    sys.argv[:] = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()


if __name__ == "__main__":
    modules, *words = sys.argv[1:]
    runs = [list(words) for is_run, words in groupby(words, lambda word: word != "--") if is_run]
    sys.path.insert(0, str(Path(runs[0][1]).parent))
    for module in modules.split(",") if modules else []:
        importlib.import_module(module)
    for world, script, *arguments in runs:
        codes = run_ranks(max(1, int(world)), partial(run, script, arguments, world == "0"))
        if any(codes):
            sys.exit(f"{script} {arguments}: exit codes {codes}")
        print("\f", end="", flush=True)

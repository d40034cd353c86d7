"""One life of a job, which is named anew by its launcher: run_ids.py FOLDER RUN_ID

Rank 0 prints the ids that all ranks have, then all that it was told.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

import torch.distributed as dist
from torch import nn

import holdfast.train as ht

folder, given = sys.argv[1:]
os.environ.pop("HOLDFAST_RUN_ID", None)
if given:
    os.environ["HOLDFAST_RUN_ID"] = given
told = io.StringIO()
with contextlib.redirect_stderr(told), ht.process_group() as pg, ht.Snapshots(folder, every=None) as snaps:
    state = snaps.track(model=nn.Linear(3, 2))
    snaps.resume()
    snaps.step()
    snaps.save()
    ids: list[list[str]] = [[] for _ in range(pg.world)]
    dist.all_gather_object(ids, [state.run_id, os.environ["HOLDFAST_RUN_ID"]])
    if pg.rank == 0:
        sys.stdout.write(" ".join(sorted({each for some in ids for each in some})) + "\n")
        sys.stdout.write(told.getvalue())

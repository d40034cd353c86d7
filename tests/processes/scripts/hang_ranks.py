"""Imports torch once and forks a rank for each pair of descriptors: where its orders come from, where its answers go.

Prints the ranks' pids. A rank's environment comes as JSON. Usage: hang_ranks.py BOOTSTRAP ENVIRONMENTS FD,FD…
"""

import json
import os
import runpy
import sys

import torch
import torch.distributed
import torch.utils.data  # noqa: F401

bootstrap, environments, *streams = sys.argv[1:]
pids = []
for environment, fds in zip(json.loads(environments), streams, strict=True):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for number, fd in enumerate(fds.split(",")):
            os.dup2(int(fd), number)
        os.closerange(3, 256)
        os.environ.update(environment)
        sys.argv = [bootstrap, "script", os.path.join(os.path.dirname(__file__), "hang_rank.py")]
        runpy.run_path(bootstrap, run_name="__main__")
        sys.exit()
    pids.append(pid)
print(*pids, flush=True)
for _ in pids:
    os.wait()

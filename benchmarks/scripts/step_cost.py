"""What counting a step costs: the same loop with torch as the launcher left it and as torch itself is, in turn, in one process.

The step is as small as torch allows, or its own noise would hide a microsecond: an optimizer without gradients and a
backward of nothing. Blocks of either kind take turns, so that a slow moment of the machine hits both; processor time of
this thread, and of each kind the fastest block counts.
"""

import json
import os
import sys
import time

import torch
from torch.optim import optimizer as optimizers

STEPS, BLOCKS = 200, 300

torch.set_num_threads(1)
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
ours = torch.autograd.backward, dict(optimizers._global_optimizer_post_hooks)
torchs = getattr(torch.autograd.backward, "__wrapped__", torch.autograd.backward), {}


def block(backward, hooks):
    torch.autograd.backward = backward
    optimizers._global_optimizer_post_hooks.clear()
    optimizers._global_optimizer_post_hooks.update(hooks)
    began_ns = time.thread_time_ns()
    for _ in range(STEPS):
        torch.autograd.backward(())
        optimizer.step()
    return (time.thread_time_ns() - began_ns) / STEPS


if len(ours[1]) != 1 or ours[0] is torchs[0]:
    sys.exit("nothing counts the steps here")
found = {"with": [], "without": []}
for _ in range(BLOCKS):
    found["without"].append(block(*torchs))
    found["with"].append(block(*ours))
with open(os.path.join(os.environ["BENCH_OUT"], "step_cost.json"), "w") as file:
    json.dump({name: min(values) for name, values in found.items()}, file)

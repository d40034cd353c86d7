"""What the jobs of these tests share: the samples, a model, a line for each micro-batch, and the faults.

Argument: {"folder", "trail", "faults": [[life, step, "kill" | "drain"]], "optional"}; rank 1 is killed, rank 0
asks to drain.
"""

import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.protocol.board_layout import BOARD_VARIABLE, HELD, SAFE_POINT, TOTAL

SAMPLES, STEP_SAMPLES, EPOCHS = 44, 8, 2
WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
LIFE = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
CASE = json.loads(sys.argv[1])

torch.set_num_threads(1)
torch.manual_seed(3)
VALUES = torch.randn(SAMPLES, 4)
MICRO = 2
DRAIN_S_MAX = 20.0
BATCH = STEP_SAMPLES // WORLD // MICRO


def board() -> tuple[memoryview, int]:
    """The words of the board, and where this worker's slot begins."""
    path, _, slot = os.environ[BOARD_VARIABLE].rpartition("@")
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q"), int(slot)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layers(values)

    def loss(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.layers(VALUES[numbers]).square().mean()


def note(step: int, numbers: torch.Tensor, loss: torch.Tensor, **more: Any) -> None:
    """One micro-batch of this optimizer step, with a random number that the training draws."""
    drawn = torch.rand(()).item()
    line = {"life": LIFE, "world": WORLD, "rank": RANK, "step": step, "numbers": numbers.tolist(), "loss": loss.item()}
    words, slot = board()
    line["of"] = words[slot + TOTAL]
    with Path(CASE["trail"]).open("a") as file:
        file.write(json.dumps({**line, "drawn": drawn, **more}) + "\n")


def fault(step: int) -> None:
    """What is to happen at the end of this optimizer step, before it is saved."""
    for life, at, what in CASE["faults"]:
        if (life, at) == (LIFE, step) and what == "kill" and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if life == LIFE and at == step and what == "drain" and RANK == 0:
            supervisor = os.getppid()
            agent = int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(agent, signal.SIGTERM)
        if life == LIFE and at <= step and what == "drain":
            wait_for_drain()


def wait_for_drain() -> None:
    """Else a busy machine's job is over before the agent has seen the signal."""
    words, _ = board()
    end_s = time.monotonic() + DRAIN_S_MAX
    while not (words[HELD] or words[SAFE_POINT]) and time.monotonic() < end_s:
        time.sleep(0.01)

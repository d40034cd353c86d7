"""A training whose saved state is poisoned: intact, and whoever goes on from it fails. poison.py FOLDER KIND

numbers   the weights are no finite numbers, and the script raises; the first life gives no loss to snaps.step()
silent    the same, and the script does not look
error     a tracked object's state makes each step raise
crash     … makes native code abort
calm      nothing of this
bug       no state is at fault: every life raises at the same step
killed    five lives are killed from outside at the same step

The first life poisons its state at POISONED_AT, saves it several times, and fails at FAILS_AT. Rank 0 writes the weights
into FOLDER/end.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import holdfast.train as ht

POISONED_AT, FAILS_AT, STEPS = 45, 65, 100
folder, kind = Path(sys.argv[1]), sys.argv[2]


class Curriculum:
    level = 0

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]


torch.manual_seed(1)
curriculum, poisoned = Curriculum(), folder / "poisoned"
with ht.process_group() as pg, ht.Snapshots(folder / "snaps", every="20 steps", memory_every=10) as snaps:
    model = ht.ddp(nn.Linear(4, 2), pg)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = snaps.track(model=model, optimizer=optimizer, curriculum=curriculum)
    snaps.resume()
    first = kind not in ("calm", "bug", "killed") and not poisoned.exists()
    while state.step < STEPS:
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if first and state.step == POISONED_AT:
            curriculum.level = -1
            if kind in ("numbers", "silent"):
                nn.init.constant_(next(model.parameters()), float("nan"))
        if curriculum.level < 0 and pg.rank == 1 and not (first and state.step < FAILS_AT):
            poisoned.touch()
            if kind == "crash":
                os.abort()
            elif kind == "numbers":
                raise FloatingPointError(f"loss is {loss.item()} at step {state.step}")
            elif kind == "error" or first:
                raise ValueError(f"step {state.step}: no level {curriculum.level}")
        if kind == "killed" and state.step == FAILS_AT and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "bug" and state.step == FAILS_AT:
            raise ValueError(f"bug at step {state.step}")
        snaps.step(**({} if first else {"loss": loss}))
    if pg.rank == 0:
        whole = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        (folder / "end").write_text(hashlib.sha256(whole).hexdigest())

"""The soak's training script: plain torch, DDP and gloo, and a ledger of all that it does.

    holdfast run … soak/train.py SITE        torchrun … soak/train.py SITE

Knows nothing of who launched it, except in one marked place. The samples of an epoch are in one global order, which
hangs on the seed and the epoch alone; whatever the world size, a step takes the next BATCH of them and deals them out.
Every few steps rank 0 saves a snapshot into SITE/disk/snapshots (temporary file, fsync, rename); a start goes on from the
newest whole one.

The ledger is one file for each process in SITE/ledger, a JSON object a line, written before and after each step and around each
snapshot, with the monotonic clock, which all pretend hosts share. A second file holds when the process was last alive.
SIGUSR1 makes the next step raise, SIGUSR2 makes it exit with 3.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

SAMPLES = 4800
BATCH = 48
SAVE_EVERY_STEPS = 10
SEED = 2026
COMPUTE_S = 0.04
"""What an accelerator would be busy with: a step takes its time without taking the cores of a small machine."""
ALIVE_EVERY_S = 0.05
SITE = Path(sys.argv[1])
SNAPSHOTS = SITE / "disk" / "snapshots"


class Ledger:
    """Append only; a line is whole or is the last one."""

    def __init__(self) -> None:
        folder = SITE / "ledger"
        name = f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(folder / f"{name}.jsonl", flags, 0o644)
        self._alive = os.open(folder / f"{name}.alive", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        threading.Thread(target=self._beat, name="alive", daemon=True).start()

    def note(self, what: str, **fields: Any) -> None:
        line = json.dumps({"is": what, "t": time.monotonic(), **fields}, separators=(",", ":"))
        os.write(self._fd, line.encode() + b"\n")

    def _beat(self) -> None:
        while True:
            os.pwrite(self._alive, f"{time.monotonic():020.6f}\n".encode(), 0)
            time.sleep(ALIVE_EVERY_S)


LEDGER = Ledger()
LEDGER.note(
    "born",
    host=socket.gethostname(),
    pid=os.getpid(),
    rank=int(os.environ["RANK"]),
    world=int(os.environ["WORLD_SIZE"]),
    restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    master=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
)

import torch  # noqa: E402 - the ledger begins before the slow part
import torch.distributed as dist  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

told: list[str] = []
"""What a signal asked for."""


def _handle(signum: int, _frame: object) -> None:
    told.append("raise" if signum == signal.SIGUSR1 else "exit")


def obey() -> None:
    if "raise" in told:
        raise RuntimeError("told to raise")
    if "exit" in told:
        sys.exit(3)


# --- HOLDFAST: the one place that knows of a launcher ---------------------------------------------------------------
# Under holdfast the ranks may be asked to stop at their next safe point; all hear the same answer at the same step.


def _asked_to_stop() -> bool:
    return False


if any(name.startswith("HOLDFAST_") for name in os.environ):
    with contextlib.suppress(ImportError):
        from holdfast.worker import should_stop as _asked_to_stop  # type: ignore[attr-defined, no-redef]

# --- END HOLDFAST ---------------------------------------------------------------------------------------------------


def order(epoch: int) -> list[int]:
    """The samples of an epoch, the same on all ranks and in all worlds."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + epoch)
    return torch.randperm(SAMPLES, generator=generator).tolist()


class Trainer:
    """The state of the training, and where it came from."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.inputs = torch.randn(SAMPLES, 32)
        self.labels = torch.randint(0, 10, (SAMPLES,))
        self.step = self.epoch = self.offset = 0
        self.tally = [0, 0]
        """How many samples went into this state, and the sum of their numbers: exact, and summed by the ranks together."""
        self.snapshot = ""
        """The last one that this state grew from."""

    # ------------------------------------------------------------ snapshots

    def restore(self, name: str) -> None:
        head, payload = read(SNAPSHOTS / name)
        state = torch.load(io.BytesIO(payload), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.epoch, self.offset = head["step"], head["epoch"], head["offset"]
        self.tally, self.snapshot = list(head["tally"]), head["id"]

    def save(self, generation: str) -> None:
        """A disk that is full costs a snapshot, not the training."""
        buffer = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        payload = buffer.getvalue()
        head = {
            "id": uuid.uuid4().hex[:12],
            "parent": self.snapshot,
            "step": self.step,
            "epoch": self.epoch,
            "offset": self.offset,
            "tally": self.tally,
            "generation": generation,
            "bytes": len(payload),
            "sha256": hashlib.sha256(payload).hexdigest(),
        }
        name = f"{self.step:09d}-{head['id']}"
        LEDGER.note("saving", snapshot=head["id"], step=self.step, parent=self.snapshot)
        temporary = SNAPSHOTS / f".{name}"
        try:
            with temporary.open("wb") as file:
                file.write(json.dumps(head).encode() + b"\n" + payload)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(SNAPSHOTS / name)
            folder = os.open(SNAPSHOTS, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            LEDGER.note("not saved", snapshot=head["id"], error=str(error))
            print(f"no snapshot at step {self.step}: {error}", flush=True)
            return
        self.snapshot = str(head["id"])
        LEDGER.note("saved", snapshot=head["id"])

    # ------------------------------------------------------------ training

    def train_one(self, model: DistributedDataParallel, rank: int, world: int) -> bool:
        """One step of all ranks together; true when somebody has seen that the training is to end."""
        batch = order_of(self.epoch)[self.offset : self.offset + BATCH]
        mine = batch[rank::world]
        LEDGER.note("begin", step=self.step + 1, epoch=self.epoch, offset=self.offset, ids=mine)
        loss = F.cross_entropy(model(self.inputs[mine]), self.labels[mine], reduction="sum") * world / len(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        time.sleep(COMPUTE_S)
        seen = torch.tensor([len(mine), sum(mine), int((SITE / "finish").exists())])
        dist.all_reduce(seen)
        count, total, finish = seen.tolist()
        self.tally = [self.tally[0] + count, self.tally[1] + total]
        self.step += 1
        self.offset += len(batch)
        if self.offset == SAMPLES:
            self.epoch, self.offset = self.epoch + 1, 0
        LEDGER.note("end", step=self.step, seen=[count, total])
        os.utime(SITE / "progress")
        return bool(finish)


_orders: dict[int, list[int]] = {}


def order_of(epoch: int) -> list[int]:
    if epoch not in _orders:
        _orders.clear()
        _orders[epoch] = order(epoch)
    return _orders[epoch]


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Head and payload. Raises ValueError when it is not whole."""
    head_line, _, payload = path.read_bytes().partition(b"\n")
    head = json.loads(head_line)
    if len(payload) != head["bytes"] or hashlib.sha256(payload).hexdigest() != head["sha256"]:
        raise ValueError(f"{path.name} is damaged")
    return head, payload


def newest() -> str:
    """The newest whole snapshot; empty when there is none."""
    for path in sorted(SNAPSHOTS.glob("[0-9]*"), reverse=True):
        try:
            read(path)
        except (OSError, ValueError, KeyError):
            continue
        return path.name
    return ""


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGUSR1, _handle)
    signal.signal(signal.SIGUSR2, _handle)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    looked_s = time.monotonic()
    chosen: list[str] = [uuid.uuid4().hex[:12], newest()] if rank == 0 else ["", ""]
    dist.broadcast_object_list(chosen)
    generation, name = chosen
    trainer = Trainer()
    if name:
        trainer.restore(name)
    LEDGER.note(
        "joined",
        generation=generation,
        rank=rank,
        world=world,
        base=trainer.snapshot,
        step=trainer.step,
        looked=looked_s,
    )
    model = DistributedDataParallel(trainer.model)
    print(f"rank {rank} of {world} goes on after step {trainer.step}", flush=True)
    ending = False
    while not ending:
        obey()
        ending = trainer.train_one(model, rank, world) or _asked_to_stop()
        if rank == 0 and (ending or trainer.step % SAVE_EVERY_STEPS == 0):
            trainer.save(generation)
    dist.barrier()
    LEDGER.note("finished", step=trainer.step)
    # Not destroy_process_group(): DDP's reducer may be the last to hold the gloo group, whose destructor then joins threads
    # with the interpreter's lock in hand, while one of them waits for that lock. One worker in some seventy hung so for
    # ever, under any launcher; what is soaked here is launchers.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

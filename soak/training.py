"""What the soak's training scripts share: a ledger of all that a worker does, snapshots, and the loop of steps.

Standard library only. Knows nothing of who launched it, except in one marked place. A script brings a `Group` (how its
ranks talk) and a `Model` (what a step computes). The samples of an epoch are in one global order, which hangs on the seed
and the epoch alone; whatever the world size, a step takes the next BATCH of them and deals them out. Every few steps rank
0 saves a snapshot into SITE/disk/snapshots (temporary file, fsync, rename); a start goes on from the newest whole one.

The ledger is one file for each process in SITE/ledger, a JSON object a line, written before and after each step and around each
snapshot, with the monotonic clock, which all pretend hosts share. A second file holds when the process was last alive.
SIGUSR1 makes the next step raise, SIGUSR2 makes it exit with 3.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

SAMPLES = 4800
BATCH = 48
SAVE_EVERY_STEPS = 10
SEED = 2026
COMPUTE_S = 0.04
"""What an accelerator would be busy with: a step takes its time without taking the cores of a small machine."""
ALIVE_EVERY_S = 0.05
SITE = Path(sys.argv[1])
SNAPSHOTS = SITE / "disk" / "snapshots"


class Group(Protocol):
    """The ranks of one generation, who have met."""

    rank: int
    world: int

    def from_first(self, words: list[str]) -> list[str]:
        """What rank 0 gave, on all ranks."""

    def summed(self, numbers: list[int]) -> list[int]:
        """The sums over all ranks."""


class Model(Protocol):
    """What is trained."""

    def load(self, payload: bytes) -> None:
        """The state of a snapshot."""

    def dump(self) -> bytes:
        """The state for a snapshot."""

    def begin(self) -> None:
        """The state is loaded: share it with the other ranks."""

    def train(self, samples: list[int], batch: int, world: int) -> None:
        """One step, with this rank's samples of a batch of so many."""


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

asked: list[str] = []
"""What a signal asked for."""


def _handle(signum: int, _frame: object) -> None:
    asked.append("raise" if signum == signal.SIGUSR1 else "exit")


def obey() -> None:
    if "raise" in asked:
        raise RuntimeError("asked to raise")
    if "exit" in asked:
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
    return Random(SEED * 1_000_003 + epoch).sample(range(SAMPLES), SAMPLES)


@dataclass(frozen=True)
class Draft:
    """A snapshot without its name."""

    head: dict[str, Any]
    payload: bytes

    @property
    def name(self) -> str:
        return f"{self.head['step']:09d}-{self.head['id']}"

    @property
    def temporary(self) -> Path:
        return SNAPSHOTS / f".{self.name}"

    def write(self) -> None:
        with self.temporary.open("wb") as file:
            file.write(json.dumps(self.head).encode() + b"\n" + self.payload)
            file.flush()
            os.fsync(file.fileno())


class Trainer:
    """The state of the training, and where it came from."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.step = self.epoch = self.offset = 0
        self.tally = [0, 0]
        """How many samples went into this state, and the sum of their numbers: exact, and summed by the ranks together."""
        self.snapshot = ""
        """The last one that this state grew from."""

    # ------------------------------------------------------------ snapshots

    def restore(self, name: str) -> None:
        head, payload = read(SNAPSHOTS / name)
        self.model.load(payload)
        self.step, self.epoch, self.offset = head["step"], head["epoch"], head["offset"]
        self.tally, self.snapshot = list(head["tally"]), head["id"]

    def save(self, generation: str) -> None:
        """A disk that is full costs a snapshot, not the training."""
        draft = self.draft(generation)
        try:
            draft.write()
        except OSError as error:
            self.discard(draft, error)
        else:
            self.publish(draft)

    def draft(self, generation: str) -> Draft:
        """A snapshot of the present state."""
        payload = self.model.dump()
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
        LEDGER.note("saving", snapshot=head["id"], step=self.step, parent=self.snapshot)
        return Draft(head, payload)

    def publish(self, draft: Draft) -> None:
        """What was written gets its name."""
        try:
            draft.temporary.rename(SNAPSHOTS / draft.name)
            folder = os.open(SNAPSHOTS, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            self.discard(draft, error)
            return
        self.snapshot = str(draft.head["id"])
        LEDGER.note("saved", snapshot=self.snapshot)

    def discard(self, draft: Draft, why: object) -> None:
        with contextlib.suppress(OSError):
            draft.temporary.unlink(missing_ok=True)
        LEDGER.note("not saved", snapshot=draft.head["id"], step=draft.head["step"], error=str(why))
        print(f"no snapshot of step {draft.head['step']}: {why}", flush=True)

    # ------------------------------------------------------------ training

    def train_one(self, group: Group) -> bool:
        """One step of all ranks together; true when one of them has seen that the training is to end."""
        batch = order_of(self.epoch)[self.offset : self.offset + BATCH]
        mine = batch[group.rank :: group.world]
        LEDGER.note("begin", step=self.step + 1, epoch=self.epoch, offset=self.offset, ids=mine)
        time.sleep(COMPUTE_S)
        count, total, finish = group.summed([len(mine), sum(mine), int((SITE / "finish").exists())])
        self.model.train(mine, len(batch), group.world)  # the last that can fail: then the step is complete
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


def run(group: Group, model: Model) -> None:
    """Train until SITE/finish is there, or the launcher asks the ranks to stop. Does not return: see its end."""
    signal.signal(signal.SIGUSR1, _handle)
    signal.signal(signal.SIGUSR2, _handle)
    looked_s = time.monotonic()
    generation, name = group.from_first([uuid.uuid4().hex[:12], newest()] if group.rank == 0 else ["", ""])
    trainer = Trainer(model)
    if name:
        trainer.restore(name)
    LEDGER.note(
        "joined",
        generation=generation,
        rank=group.rank,
        world=group.world,
        base=trainer.snapshot,
        step=trainer.step,
        looked=looked_s,
    )
    model.begin()
    print(f"rank {group.rank} of {group.world} goes on after step {trainer.step}", flush=True)
    ending = False
    while not ending:
        obey()
        ending = trainer.train_one(group) or _asked_to_stop()
        if group.rank == 0 and (ending or trainer.step % SAVE_EVERY_STEPS == 0):
            trainer.save(generation)
    group.summed([0])
    LEDGER.note("finished", step=trainer.step)
    # Not destroy_process_group(): DDP's reducer may be the last to hold the gloo group, whose destructor then joins threads
    # with the interpreter's lock in hand, while one of them waits for that lock. One worker in some seventy hung so for
    # ever, under any launcher; what is soaked here is launchers.
    sys.stdout.flush()
    os._exit(0)

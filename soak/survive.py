"""The soak's training script with holdfast.train: workers go on in their processes when others are lost.

    holdfast run … soak/survive.py SITE

Its state is kept by `ht.Snapshots`, in memory; what training.py saves beside it is for the checker, and for a job that has
lost the memory of a node, so it is saved more rarely, and in a thread: a disk that stalls stops no step. What it writes
down, and its steps, are in training.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from typing import Any

import training  # first: the ledger begins before the slow part

import torch  # isort: skip
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from train import Perceptron

import holdfast.train as ht
from holdfast.train.group import ProcessGroup

SAVE_EVERY_STEPS = 5 * training.SAVE_EVERY_STEPS


class Group:
    """All ranks of the world that is there now."""

    def __init__(self, pg: ProcessGroup) -> None:
        self._pg = pg

    @property
    def rank(self) -> int:
        return self._pg.rank

    @property
    def world(self) -> int:
        return self._pg.world

    def from_first(self, words: list[str]) -> list[str]:
        dist.broadcast_object_list(words)
        return words

    def summed(self, numbers: list[int]) -> list[int]:
        sums = torch.tensor(numbers)
        dist.all_reduce(sums)
        return [int(each) for each in sums.tolist()]


class Writing:
    """A snapshot that a thread writes."""

    def __init__(self, draft: training.Draft) -> None:
        self.draft = draft
        self.error: OSError | None = None
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            self.draft.write()
        except OSError as error:
            self.error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()


class Trainer(training.Trainer):
    """Its place in the data is saved and handed on with the model."""

    generation = ""
    """The one that has come to this state; empty: it is that of a snapshot."""
    _writing: Writing | None = None

    def begin_save(self, generation: str) -> None:
        """Begin to write a snapshot, unless the one before is still being written."""
        if self._writing is None:
            self._writing = Writing(self.draft(generation))

    def end_save(self, *, wait: bool = False) -> None:
        """Give the snapshot its name if it is written. Only here: it must not appear once others have gone on without
        this rank."""
        writing = self._writing
        if writing is None or not (wait or writing.done):
            return
        self._writing = None
        writing.wait()
        if writing.error is None:
            self.publish(writing.draft)
        else:
            self.discard(writing.draft, writing.error)

    def give_up_save(self) -> None:
        """The generation that it is of is over: what is written gets no name."""
        self._writing = None

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in PLACE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in PLACE:
            setattr(self, name, state[name])


PLACE = ("step", "epoch", "offset", "tally", "snapshot", "generation")


def goes_on_from_file(trainer: Trainer, group: Group) -> None:
    """Where the newest file is newer than what `resume()` has found."""
    (name,) = group.from_first([training.newest()])
    if name and int(name.partition("-")[0]) > trainer.step:
        trainer.restore(name)
        trainer.generation = ""


def joined(trainer: Trainer, group: Group) -> str:
    """All ranks have met; the name of their generation."""
    trainer.give_up_save()
    looked_s = time.monotonic()
    generation, name = group.from_first([uuid.uuid4().hex[:12], training.newest()])
    if name:
        trainer.snapshot = name.partition("-")[2]
    training.LEDGER.note(
        "joined",
        generation=generation,
        rank=group.rank,
        world=group.world,
        base=trainer.snapshot,
        step=trainer.step,
        looked=looked_s,
        after=trainer.generation,
    )
    trainer.generation = generation
    print(f"rank {group.rank} of {group.world} goes on after step {trainer.step}", flush=True)
    return generation


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGUSR1, training._handle)
    signal.signal(signal.SIGUSR2, training._handle)
    replaces = "HOLDFAST_REPLACEMENT" in os.environ
    folder = training.SITE / "survive"
    with (
        ht.process_group() as pg,
        ht.Snapshots(
            folder, every=None, memory_every=5, options=ht.SnapshotOptions(exit_on_stop=False, fresh_ok=True)
        ) as snaps,
    ):
        group, perceptron = Group(pg), Perceptron()
        trainer = Trainer(perceptron)
        perceptron.shared = DistributedDataParallel(perceptron.model)
        state = snaps.track(model=perceptron.shared, optimizer=perceptron.optimizer, trainer=trainer)
        snaps.resume()
        if not replaces:
            goes_on_from_file(trainer, group)
            state.step = trainer.step

        @ht.survive(snaps)
        def train() -> None:
            generation = joined(trainer, group)
            ending = False
            while not ending:
                training.obey()
                ending = trainer.train_one(group)
                snaps.step()
                ending = ending or snaps.stopping
                trainer.end_save()
                if ending or trainer.step % SAVE_EVERY_STEPS == 0:
                    group.summed([0])  # all have done the step, and none goes back behind its snapshot
                    if group.rank == 0 and ending:
                        trainer.end_save(wait=True)
                        trainer.save(generation)
                    elif group.rank == 0:
                        trainer.begin_save(generation)
            group.summed([0])

        train()
        if not snaps.stopping:
            snaps.save(wait=True)  # else the savers of all nodes wait for each other, to write what is in memory
        training.LEDGER.note("finished", step=trainer.step)
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""What the saver writes of its own accord when all workers of the node have died, and what it must not put together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from holdfast.snapshots import shelf
from holdfast.snapshots.attempt import Ticket
from holdfast.snapshots.saver_client import Place, SaverClient, rescue_attempt
from holdfast.snapshots.slots import Owner, Slots
from tests.snapshots.test_snap_saver import LAUNCHER, SIZE, WORKER, committed, until


def test_a_crash_among_saves_of_one_step_mixes_nothing(tmp_path: Path) -> None:
    """One rank died before it had staged the third one."""
    held = shelf.Shelf.make("twice")
    folder, number = tmp_path / "snaps", rescue_attempt()
    folder.mkdir()
    anchor = subprocess.Popen(["sleep", "600"])
    clients = []
    for rank, saves in ((0, (2, 3)), (1, (1, 2))):
        clients.append(SaverClient(Place(held.path, rank, 3, anchor.pid, held)))
        own = Slots(held.path, Owner(rank, rank, 2, 3))
        for save in saves:
            memory = own.stage(40, SIZE)
            assert memory is not None
            memory[:] = bytes([save]) * SIZE
            own.commit(Ticket(str(folder), 40, number, rank, 2, {"save": save}).to_json())
        own.close()
    for client in clients:
        client._drop()
    until(lambda: list(committed(folder)) == [40])
    assert [path.read_bytes()[:1] for path in sorted(folder.glob("step_*/*.safetensors"))] == [b"\2", b"\2"]
    anchor.kill()
    anchor.wait()
    held.close()
    until(lambda: not held.path.exists())


def test_a_life_that_went_back_to_an_older_step_is_rescued_too(tmp_path: Path) -> None:
    """What its predecessor saved of later steps was found damaged."""
    number = rescue_attempt()
    first = "persist(40)\nassert saver.wait(20)\nsay()\ndie()"
    second = f"import shutil\nshutil.rmtree(FOLDER + '/step_000000040.0001')\nstage(30, {number})\ndie()"
    line = [sys.executable, "-c", LAUNCHER, WORKER, str(tmp_path), first, second]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    until(lambda: list(committed(tmp_path)) == [30], done.stderr)
    until(lambda: not Path(done.stdout.strip()).exists())

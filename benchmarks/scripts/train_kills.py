"""One trainer after the other is killed, at random moments and at every named phase of a save; each goes on from the last.

    train_kills.py FOLDER COUNT SEED          prints a JSON object: kills, resumes by source, faults

Lives are forked from one process that has imported torch once. What they resume is compared, bit for bit, with what a
trainer that was never killed had at that step.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn

import holdfast.train as ht
from holdfast.train.snapshots import changes
from holdfast.train.snapshots.changes import PHASES
from holdfast.train.snapshots.in_process import InProcessStaging
from holdfast.train.snapshots.saver_client import SaverClient
from holdfast.train.snapshots.slots import Slots

from holdfast.train import save as saving, sharding, snapshots_api

RUN_ID = f"kills{os.getpid()}"
STEPS_MAX = 5000
LIFE_S_MAX = 0.4
LIMIT_S = 30.0 * float(os.environ.get("TEST_SLOWNESS", "1"))
OWN_POINTS = ("collected", "half copied", "staged", "begun", "handed over", "saved")
SEEN_POINTS = ("attempt", "record", "manifest")
POINTS = (
    *(f"trainer: {each}" for each in OWN_POINTS),
    *(f"saver: {each}" for each in SEEN_POINTS),
    *(f"no memory: {each}" for each in PHASES),
)
STRIDE = 7
"""Points follow each other at this distance, so that few kills are of all kinds; it has no divisor in common with their number."""


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Random numbers come from torch's own generator, which has to be restored, too."""
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    held = hashlib.sha256()
    state = [value for each in optimizer.state.values() for value in each.values()]
    for tensor in (*model.state_dict().values(), *state, torch.get_rng_state()):
        held.update(tensor.numpy().tobytes())
    return held.hexdigest()[:16]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, folder: Path, chance: random.Random) -> None:
    """Have this process killed when it, or its saver, comes there, not always the first time."""
    skip = chance.randrange(4)

    def reached(_: str = "") -> None:
        nonlocal skip
        skip -= 1
        if skip < 0:
            die()

    def after(owner: Any, name: str, then: Callable[[], Any] = reached) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def changed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            then()
            return result

        setattr(owner, name, changed)

    who, _, where = point.partition(": ")
    if who == "no memory":
        reach = lambda phase: reached() if phase == where else None  # noqa: E731
        for name in ("begin", "write_rank", "commit"):
            setattr(changes, name, partial(getattr(changes, name), at=reach))
        snapshots_api.open_tier = lambda **_: InProcessStaging()
    elif who == "saver":
        threading.Thread(target=_watch, args=(where, folder, reached), daemon=True).start()
    elif where == "half copied":
        original = sharding.copy_alike

        def half(views: Any, tensors: Any) -> None:
            original(views[: len(views) // 2], tensors[: len(views) // 2])
            reached()
            original(views, tensors)

        sharding.copy_alike = half
    elif where != "saved":
        owner, name = {
            "collected": (saving.Tracker, "collect"),
            "staged": (Slots, "commit"),
            "begun": (changes, "begin"),
            "handed over": (SaverClient, "persist"),
        }[where]
        after(owner, name)


def _watch(where: str, folder: Path, reached: Callable[[], None]) -> None:
    """The saver's phases, as they show in the folder."""
    pattern = {"attempt": "attempt.*", "record": "attempt.*/rank_00000.json", "manifest": "attempt.*/MANIFEST.json"}[
        where
    ]
    while True:
        if glob.glob(str(folder / pattern)):
            reached()
        time.sleep(0.0005)


def life(folder: Path, point: str, seed: int, say: Callable[[str], None]) -> None:
    """Resume, say what was found, train and save until killed."""
    chance = random.Random(seed)
    model, optimizer = build()
    if point:
        arm(point, folder, chance)
    snaps = ht.Snapshots(folder, every="5 steps", memory_every=2, keep=ht.Keep(last=2))
    snaps.track(model=model, optimizer=optimizer)
    resumed = snaps.resume()
    say(
        f"resumed {resumed.step if resumed else 0} {resumed.source if resumed else 'nothing'} {fingerprint(model, optimizer)}"
    )
    while snaps.state.step < STEPS_MAX:
        train(model, optimizer)
        snaps.step()
        if chance.random() < 0.2:
            snaps.save()
            say(f"saved {snaps.state.step}")
            if point == "trainer: saved":
                time.sleep(chance.uniform(0, 0.1))
                die()


def calm(say: Callable[[str], None], count: int) -> None:
    model, optimizer = build()
    say(f"{fingerprint(model, optimizer)}")
    for _ in range(count):
        train(model, optimizer)
        say(fingerprint(model, optimizer))


def fork(work: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        signal.alarm(int(LIMIT_S))
        code = 1
        try:
            os.environ.update(TORCHELASTIC_RUN_ID=RUN_ID, LOCAL_RANK="0")
            torch.set_num_threads(1)
            with os.fdopen(into, "w", buffering=1) as file:
                work(lambda text: print(text, file=file))
            code = 0
        except BaseException as error:  # noqa: BLE001 - told by the exit code
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    os.close(into)
    return pid, out


def watch_life(pid: int, out: int, kill_after_s: float | None) -> tuple[list[str], bool]:
    """What it said until its end, and whether SIGKILL was its end; killed so long after it had resumed, if not before."""
    text, deadline, killed, late = b"", time.monotonic() + LIMIT_S, False, False
    while True:
        readable, _, _ = select.select([out], [], [], max(deadline - time.monotonic(), 0))
        if not readable:
            os.kill(pid, signal.SIGKILL)
            killed, late = True, late or not text  # it said nothing within the limit: it hangs
            deadline = time.monotonic() + LIMIT_S
            continue
        data = os.read(out, 65536)
        if not data:
            break
        if not text and kill_after_s is not None and not killed:
            deadline = time.monotonic() + kill_after_s
        text += data
    os.close(out)
    _, status = os.waitpid(pid, 0)
    return text.decode().splitlines(), os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and not late


def main() -> None:
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    pid, out = fork(partial(calm, count=STEPS_MAX if count > 20 else 1500))
    expected, _ = watch_life(pid, out, None)
    found: Counter[str] = Counter()
    faults: list[str] = []
    bound = newest = 0
    for number in range(count + 1):
        point = "" if number == count or number % 2 else POINTS[(number // 2 * STRIDE + seed) % len(POINTS)]
        pid, out = fork(partial(life, folder, point, seed * 100_000 + number))
        said, by_sigkill = watch_life(pid, out, chance.uniform(0, LIFE_S_MAX) if not point else 2.0)
        if not said and by_sigkill:
            found["killed while it resumed"] += 1  # what it was armed for was still going on, of the life before
            continue
        if not said or not said[0].startswith("resumed"):
            faults.append(f"life {number}, killed at {point or 'random'}: it did not resume: {said[:1]}")
            continue
        _, step, source, mark = said[0].split()
        found[source] += 1
        if int(step) < bound:
            faults.append(f"life {number}: resumed {step}, and {bound} was saved")
        if int(step) < len(expected) and mark != expected[int(step)]:
            faults.append(f"life {number}: step {step} is not what it was")
        newest = max(newest, int(step))
        lasting = (
            [int(line.split()[1]) for line in said if line.startswith("saved")] if "no memory" not in point else []
        )
        bound = max([int(step) if source == "disk" or lasting else 0, *lasting, newest_committed(folder)])
        if chance.random() < 0.4:
            for slot in glob.glob(f"/dev/shm/holdfast-*-{RUN_ID}-*/*.[01]"):
                with contextlib.suppress(OSError):
                    os.unlink(slot)
    print(json.dumps({"kills": count, "resumed": found, "faults": faults, "newest": newest}))


def newest_committed(folder: Path) -> int:
    return max((int(path.name[5:].partition(".")[0]) for path in folder.glob("step_*")), default=0)


if __name__ == "__main__":
    main()

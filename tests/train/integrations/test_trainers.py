"""Real trainers with real faults: a rank is killed, the job is drained, a new job goes on with one rank."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from holdfast.protocol.errors import DataError, MissingPackageError
from holdfast.protocol.exit_codes import EXIT_REQUEUE
from tests.warm_jobs import WarmJobs

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [pytest.mark.xdist_group("torch trainers"), pytest.mark.timeout(300)]
KILLED, DRAINED, LAST = (4, 7), 8, 12
"""Optimizer steps: 6 in each of two epochs. The second kill leaves the state of an epoch's end."""
BATCHES = 22
"""Of both epochs: the last step of each has fewer than the others."""

Note = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What one library's script does."""

    script: str
    optional: tuple[str, ...] = ()
    """What one rank cannot continue from: the data of two."""
    begins_anew: bool = False
    """One rank that continues begins the epoch again."""
    draws_alike: bool = True
    """Random numbers are the same after a resume."""
    steps: int = 0
    """How many steps the job is expected to have, as its snapshots count them; 0: not known (two loaders)."""


CASES = {
    "transformers": Case("of_transformers.py", steps=LAST),
    "lightning": Case("of_lightning.py", steps=BATCHES),
    "accelerate": Case("of_accelerate.py"),
    "torchdata": Case("of_torchdata.py", optional=("loader",), begins_anew=True),
    "torchtitan": Case("of_torchtitan.py", optional=("dataloader",), draws_alike=False),
}
LACKING = [
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed: make test-trainers")
]


def trained(
    trainer_jobs: WarmJobs, case: Case, folder: Path, world: int = 2, faults: Sequence[Any] = (), code: int = 0
) -> list[Note]:
    """The notes of a job whose snapshots are in `folder`."""
    trail = folder.with_suffix(f".{world}.trail")
    optional = case.optional if world == 1 else ()
    argument = json.dumps({"folder": str(folder), "trail": str(trail), "faults": faults, "optional": optional})
    line = ("run", "--standalone", "--nproc-per-node", str(world), "--max-restarts", "2", SCRIPTS / case.script)
    done = trainer_jobs.run("holdfast", *line, argument, cwd=folder.parent, timeout=120)
    assert done.returncode == code, done
    return [json.loads(each) for each in trail.read_text().splitlines()]


def by_step(notes: list[Note], case: Case, life: int = 0) -> dict[tuple[int, int], list[Note]]:
    """Notes of one life, by step and rank, as far as they are to be the same in each life."""
    found: dict[tuple[int, int], list[Note]] = defaultdict(list)
    left_out = {"life", "of"} if case.draws_alike else {"life", "of", "drawn"}
    for each in notes:
        if each["life"] == life:
            found[each["step"], each["rank"]].append({key: each[key] for key in each.keys() - left_out})
    return found


def whole(notes: list[Note], step: int) -> tuple[list[int], float]:
    """The samples of an optimizer step, and their mean loss."""
    found = [each for each in notes if each["step"] == step and each["numbers"]]
    return sorted(chain.from_iterable(each["numbers"] for each in found)), fmean(each["loss"] for each in found)


@pytest.mark.parametrize("name", [pytest.param(name, marks=LACKING if name == "torchtitan" else []) for name in CASES])
def test_killed_drained_and_with_another_number_of_ranks(trainer_jobs: WarmJobs, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    notes = trained(trainer_jobs, case, tmp_path / "undisturbed")
    undisturbed = by_step(notes, case)
    assert {step for step, _ in undisturbed} == set(range(1, LAST + 1))
    assert {each["of"] for each in notes} == {case.steps}

    faults = [*([life, step, "kill"] for life, step in enumerate(KILLED)), [len(KILLED), DRAINED, "drain"]]
    disturbed = trained(trainer_jobs, case, tmp_path / "a", faults=faults, code=EXIT_REQUEUE)
    for life, killed in enumerate(KILLED, 1):
        done = by_step(disturbed, case, life)
        assert min(step for step, _ in done) == killed, "no other step is repeated"
        for at in done if life == len(KILLED) else {at for at in done if at[0] < KILLED[life]}:
            assert done[at] == undisturbed[at], "the same samples, losses, logged means and random numbers"
    newest = max(step for step, _ in done)
    assert newest < LAST

    alone = trained(trainer_jobs, case, tmp_path / "a", world=1)
    left = {each["step"] for each in alone}
    last = newest + LAST // 2 if case.begins_anew else LAST
    assert left == set(range(newest + 1, last + 1)), "no step of the first job is repeated"
    for step in () if case.optional else left:
        numbers, loss = whole(alone, step)
        assert (numbers, pytest.approx(loss, rel=1e-4)) == whole(notes, step)


def test_a_position_of_another_number_of_ranks_is_refused() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from holdfast.train.integrations.torchdata import ResumableLoader

    loader = ResumableLoader(StatefulDataLoader(range(4)))
    saved = loader.state_dict()
    loader.load_state_dict(saved)
    with pytest.raises(DataError, match=r"position with 2 ranks means nothing with 1: .*optional="):
        loader.load_state_dict({**saved, "world": 2})


@pytest.mark.parametrize("name", CASES)
def test_without_the_library_one_line_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in [*sys.modules, name]:
        if each.partition(".")[0] == name:
            monkeypatch.setitem(sys.modules, each, None)
    monkeypatch.delitem(sys.modules, f"holdfast.train.integrations.{name}", raising=False)
    with pytest.raises(
        MissingPackageError, match=rf"^holdfast\.train\.integrations\.{name} .*pip install 'holdfast\[{name}\]'$"
    ):
        import_module(f"holdfast.train.integrations.{name}")

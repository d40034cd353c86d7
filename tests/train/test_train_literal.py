"""The examples of docs/train.md run as printed: in one plain process, under torchrun and under holdfast run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast.train as ht
from holdfast.protocol.errors import ProcessGroupError
from holdfast.train.snapshots import folder
from tests.warm import Warm
from tests.warm_jobs import WarmJobs

SCRIPTS = Path(__file__).parent / "scripts"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "train.md"
PRELUDE = """
import torch
from torch import nn
import holdfast.train as ht

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 150
    def __getitem__(self, index):
        row = torch.linspace(-1, 1, 6) * (index % 7)
        return (row, row.sum()[None]) if PAIRS else row

def loss_fn(out, *targets):
    return nn.functional.mse_loss(out, targets[0]) if targets else out.square().mean()

torch.manual_seed(0)
dataset = Rows()
"""
TOLD = """
print(f"rank {pg.rank} of {pg.world}: {state.epoch} epochs, {state.step} steps, {float(micro.loss):.6f}" if 'micro' in vars() else "nothing left")
"""
pytestmark = [pytest.mark.xdist_group("torch"), pytest.mark.timeout(180)]

BLOCKS = {"loader": "ht.accumulate(model, loader)", "number": "ht.accumulate(model, micro_batches=4)"}


def script(kind: str, tmp_path: Path) -> Path:
    blocks = [
        block
        for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
        if "ht.process_group()" in block and BLOCKS[kind] in block and "@ht.survive" not in block
    ]
    assert len(blocks) == 1
    # Whether a batch is a pair is the one thing in which the two differ.
    text = f"PAIRS = {'targets' in blocks[0]}\n{PRELUDE}\n{blocks[0]}\n{TOLD}"
    path = tmp_path / "train.py"
    path.write_text(text.replace("import holdfast.train as ht\n\nwith", "\nwith"))
    return path


TWO_RANKS = ["--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("kind", "how"), [("number", "plain"), ("number", "torchrun"), ("number", "holdfast"), ("loader", "plain")]
)
def test_as_printed(warm: Warm, tmp_path: Path, kind: str, how: str) -> None:
    path = script(kind, tmp_path)
    if how == "holdfast":
        with WarmJobs(warm, tmp_path) as jobs:
            done = jobs.run("holdfast", "run", *TWO_RANKS, "--log-dir", "logs", path, cwd=tmp_path, timeout=150)
    else:
        under = [SCRIPTS / "under_torchrun.py", *TWO_RANKS] if how == "torchrun" else []
        done = warm.run([*under, path], timeout=150, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"rank (\d) of (\d): 10 epochs, (\d+) steps, ([\d.]+)", done.stdout)
    world = 1 if how == "plain" else 2
    assert sorted(rank for rank, *_ in told) == [str(rank) for rank in range(world)], done.stdout
    assert len({loss for *_, loss in told}) == 1
    assert "Warning" not in done.stderr.replace("UserWarning: This DataLoader will create 4 worker processes", "")


def test_a_second_start_of_a_finished_job_finds_nothing_left(warm: Warm, tmp_path: Path) -> None:
    path = script("number", tmp_path)
    text = path.read_text().replace('every="2min"', 'every="8 steps"').replace("num_workers=4", "num_workers=0")
    path.write_text(text.replace("range(10)", "range(2)"))
    told = []
    for _ in range(2):
        done = warm.run([path], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert "10 epochs" in told[0]
    # The end is saved whatever is due, so there is nothing to train again.
    assert told[1] == "nothing left\n"
    found = folder.survey(tmp_path / "runs" / "a")
    assert found.committed
    assert not found.debris


# --- micro_batches=4 --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fsdp_on_cpus")
def test_a_number_of_batches_is_exact_at_the_tail_on_any_number_of_ranks(warm: Warm) -> None:
    told = warm.found(SCRIPTS / "loss_curves.py", "tail", timeout=150)
    expected = told.pop("by hand")
    assert [count for *_, count in told["ddp 1"]] == [3, 3, 3, 1]
    for name, steps in told.items():
        assert [each[:2] for each in steps] == [pytest.approx(each[:2], rel=1e-6) for each in expected], name
        assert [count for *_, count in steps] == [3, 3, 3, 1], name


def lasts(model: nn.Module, loader: object, micro_batches: int | None) -> list[bool]:
    found = []
    for rows in loader:  # type: ignore[attr-defined]
        with ht.accumulate(model, micro_batches) as micro:
            micro.backward(model(rows).mean())
        found.append(micro.last)
    return found


def test_an_epoch_ends_a_step_and_the_next_begins_anew() -> None:
    model, loader = nn.Linear(2, 1), ht.DataLoader(torch.ones(10, 2), 2)
    assert lasts(model, loader, 3) == [False, False, True, False, True]
    assert lasts(model, loader, 3) == [False, False, True, False, True]
    assert lasts(model, loader, 9) == [False] * 4 + [True]
    assert lasts(model, loader, None) == [True] * 5


@pytest.mark.parametrize(("tail", "expected"), [("even", [2.5, 7.0]), ("drop", [2.5, 6.5]), ("pad", [2.5, 7.0])])
def test_weights_over_a_tail(tail: str, expected: list[float]) -> None:
    """A loss that tells which samples had which weight: its gradient is the mean over them."""
    rows = torch.arange(9.0)[:, None]
    model = nn.Linear(1, 1, bias=False)
    loader = ht.DataLoader(rows, 2, tail=tail)  # type: ignore[arg-type]
    means = []
    for batch in loader:
        with ht.accumulate(model, micro_batches=3) as micro:
            micro.backward(model(batch).mean())
        if micro.last:
            means.append(model.weight.grad.item())
            model.zero_grad()
    assert means == pytest.approx(expected)


def test_parts_of_one_batch_are_counted_as_before() -> None:
    model, loader = nn.Linear(2, 1), ht.DataLoader(torch.ones(32, 2), 8)
    found = []
    for batch in loader:
        for part in batch.split(2):
            with ht.accumulate(model, micro_batches=4) as micro:
                micro.backward(model(part).mean())
            found.append((micro.last, micro.scale))
    assert found == [(number % 4 == 3, 0.25) for number in range(16)]


def test_a_loop_within_the_loop_does_not_disturb() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    loader, inner = ht.DataLoader(torch.ones(10, 2), 2), ht.DataLoader(torch.ones(3, 2), 1)
    found = []
    for batch in loader:
        with ht.accumulate(model, micro_batches=2) as micro:
            micro.backward(model(batch).mean())
        found.append(micro.last)
        for rows in inner:
            with ht.accumulate(other) as validated:
                validated.backward(other(rows).mean())
            assert validated.last
            break
    assert found == [False, True, False, True, True]
    with ht.accumulate(model, micro_batches=2) as micro:  # no loop of ours around it
        micro.backward(model(torch.ones(1, 2)).mean())
    assert not micro.last


def test_a_number_that_contradicts_the_loader() -> None:
    model = nn.Linear(2, 1)
    for options in ({"global_batch_size": 4}, {"micro_batches": 2}):
        loader = ht.DataLoader(torch.ones(12, 2), 2, **options)
        with pytest.raises(ProcessGroupError, match=r"accumulate\(model, loader\)"):
            lasts(model, loader, 3)
        assert lasts(model, loader, loader.micro_batches) == lasts(model, loader, None) == [False, True] * 3

"""Guards: each warns once about its mistake and is silent about the correct code beside it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

import holdfast.train as ht
from holdfast.train import guards, mistakes
from tests.warm import Warm

SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = [pytest.mark.xdist_group("torch"), pytest.mark.timeout(180)]

WARNED = {
    "epoch_forgotten": "set_epoch",
    "saved_alone": "barrier",
    "saved_alone_fsdp": "barrier",
    "accumulated_with_sync": "no_sync",
    "accumulated_with_sync_fsdp": "no_sync",
    "nothing_unused": "find_unused_parameters",
    "loss_not_reduced": "loss",
    "best_of_own_loss": "loss",
}
SILENT = {
    "epoch_set",
    "saved_with_barrier",
    "saved_by_all",
    "saved_to_memory",
    "accumulated_well",
    "no_sync_by_hand",
    "two_passes_one_backward",
    "something_unused",
    "loss_reduced",
    "best_of_common_loss",
}


def test_mistakes_and_correct_code_on_two_ranks(warm: Warm) -> None:
    done = warm.run([SCRIPTS / "guard_cases.py"], timeout=150)
    assert done.returncode == 0, done.stderr
    said = dict(line.partition(":")[::2] for line in done.stdout.splitlines())
    expected = {f"0 {case}": f" {mistake}" for case, mistake in WARNED.items()}
    expected |= {f"1 {case}": "" for case in WARNED}
    expected |= {f"{rank} {case}": "" for rank in (0, 1) for case in SILENT}
    expected |= {f"{rank} same weights": " True" for rank in (0, 1)}
    assert said == expected


def draw(sampler: DistributedSampler, times: int) -> None:
    for _ in range(times):
        list(sampler)


@pytest.fixture
def sampler() -> DistributedSampler:
    return DistributedSampler(range(6), num_replicas=2, rank=0)


def test_a_warning_says_the_fix_and_how_to_switch_it_off(sampler) -> None:
    with ht.guarded(), pytest.warns(ht.GuardWarning) as caught:
        draw(sampler, 4)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "sampler.set_epoch(epoch)" in text
    assert "HOLDFAST_GUARDS=0" in text


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_off_by_the_variable(sampler, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOLDFAST_GUARDS", value)
    with warnings.catch_warnings(record=True) as caught, ht.process_group(device="cpu"), ht.guarded():
        warnings.simplefilter("always")
        draw(sampler, 3)
    assert not caught


def test_off_by_the_argument_and_on_without(sampler) -> None:
    with warnings.catch_warnings(), ht.process_group(device="cpu", guards=False):
        warnings.simplefilter("error")
        draw(sampler, 3)
    with pytest.warns(ht.GuardWarning), ht.process_group(device="cpu"):
        draw(sampler, 2)


def test_torch_is_as_it_was_afterwards() -> None:
    before = (torch.save, DistributedSampler.__iter__, DistributedSampler.set_epoch)
    with ht.guarded():
        assert DistributedSampler.__iter__ is not before[1]
    with pytest.raises(KeyError), ht.guarded():
        raise KeyError
    assert (torch.save, DistributedSampler.__iter__, DistributedSampler.set_epoch) == before


def test_what_somebody_else_put_there_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", torch.save)  # put back at the end
    guard = guards.Guards(0, 2, None)
    theirs = object()
    with guard.connected():
        torch.save = theirs
    assert torch.save is theirs


class BrokenStore:
    """Its host is gone."""

    def add(self, *_arguments: object) -> int:
        raise RuntimeError("Connection reset by peer")

    set = check = multi_get = add


def test_a_store_that_is_gone_is_no_reason_to_stop() -> None:
    board = mistakes.SharedFacts(0, 2, BrokenStore())
    loss = mistakes.LossDiffers(lambda mistake, text: pytest.fail(text), board)
    for _ in range(5):
        loss.told(1.0)
    assert board.count("a", 1) == 0


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [(1.0, 1.0 + 1e-7, True), (1.0, 1.1, False), (float("nan"), float("nan"), True), (float("nan"), 1.0, False)],
)
def test_which_losses_differ(first: float, second: float, same: bool) -> None:
    store = torch.distributed.HashStore()
    told: list[str] = []
    zero, one = (
        mistakes.LossDiffers(lambda m, text: told.append(text), mistakes.SharedFacts(r, 2, store)) for r in (0, 1)
    )
    for _ in range(2):
        zero.told(first)
        one.told(second)
    assert bool(told) is not same

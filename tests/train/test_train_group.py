"""The process group, the guards in it, and accumulation."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import itertools
import json
import re
import sys
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

import holdfast.train as ht
from holdfast.protocol.errors import ProcessGroupError
from holdfast.train import guards, mistakes, torch_private
from holdfast.train.data import GlobalBatch, Share
from holdfast.train.group import GroupConnection, ProcessGroup, _destroy
from holdfast.train.guards import guarded
from tests.warm import Warm

SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = [pytest.mark.xdist_group("torch"), pytest.mark.timeout(180)]


def test_every_name_is_there_and_hides_no_module() -> None:
    assert sorted(ht._HOMES) == list(ht.__all__)
    for name in ht.__all__:
        assert getattr(ht, name).__name__ == name
        assert f"{ht.__name__}.{name}" not in sys.modules


def test_the_page_names_all_names_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    assert [name for name in ht.__all__ if not re.search(rf"\b{name}\b", page)] == []
    assert set(re.findall(r"\bht\.(\w+)", page)) <= set(ht.__all__)


def test_a_loader_shows_what_a_script_needs_and_no_more() -> None:
    assert len(inspect.signature(ht.DataLoader).parameters) <= 14
    members = {name for name in {*dir(ht.DataLoader), *vars(ht.DataLoader(range(2)))} if not name.startswith("_")}
    place = {"epoch", "cursor", "remaining", "state_dict", "load_state_dict", "set_epoch", "trained", "regroup"}
    assert members == place | {"dataset", "batch_size", "global_batch_size", "micro_batches", "share", "batch_number"}


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.allow_threads("pt_gloo")
def test_a_world_of_one_without_a_launcher(no_launcher) -> None:
    for _ in range(2):
        with ht.process_group(device="cpu") as pg:
            assert (pg.rank, pg.world, pg.local_rank, pg.device) == (0, 1, 0, torch.device("cpu"))
            pg.store.set("a", "b")
            assert pg.store.get("a") == b"b"
            assert isinstance(ht.ddp(torch.nn.Linear(2, 2), pg).module, torch.nn.Linear)
        assert not dist.is_initialized()


def test_destroyed_after_an_exception(no_launcher) -> None:
    with pytest.raises(KeyError), ht.process_group(device="cpu"):
        raise KeyError
    assert not dist.is_initialized()


def test_a_program_may_destroy_its_group_itself(no_launcher) -> None:
    with ht.process_group(device="cpu"):
        dist.destroy_process_group()
    assert not dist.is_initialized()


class NcclGroups:
    """torch's functions for groups on NCCL, as far as a regroup calls them: without a group they raise."""

    def __init__(self) -> None:
        self.aborted = 0

    def get_backend(self) -> str:
        if self.aborted:
            raise ValueError("Default process group has not been initialized")
        return "nccl"

    def is_initialized(self) -> bool:
        return not self.aborted

    def abort(self) -> None:
        self.get_backend()
        self.aborted += 1


@pytest.mark.parametrize("cut", [True, False], ids=["aborted by the loss", "not aborted yet"])
def test_a_group_on_nccl_that_was_aborted_can_be_left(monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    groups = NcclGroups()
    monkeypatch.setattr(dist, "get_backend", groups.get_backend)
    monkeypatch.setattr(dist, "is_initialized", groups.is_initialized)
    monkeypatch.setattr("holdfast.train.torch_private.abort_groups", groups.abort)
    connection = GroupConnection("nccl", None, on_nccl=True)
    if cut:
        groups.abort()
    _destroy(ProcessGroup(0, 2, 0, torch.device("cpu"), None, connection))
    assert groups.aborted == 1


class GroupOnNccl2:
    """A group on nccl2 with a batch of operations under way, which its abort ends."""

    def __init__(self) -> None:
        self.in_batch = True
        self.aborts = 0

    def abort(self) -> None:
        self.in_batch = False
        self.aborts += 1

    def start_coalescing(self) -> None:
        if self.in_batch:
            raise RuntimeError("startCoalescing called while a batch is already active")


def test_groups_on_nccl2_are_aborted_though_a_batch_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_abort_process_group` of torch 2.15 aborts within a batch of its own."""
    c10d = dist.distributed_c10d
    groups = [GroupOnNccl2(), GroupOnNccl2()]
    forgotten = []

    @contextlib.contextmanager
    def batch(group: GroupOnNccl2, device: object = None) -> Iterator[None]:
        group.start_coalescing()
        yield

    def abort() -> None:
        with c10d._coalescing_manager(groups[0], "cuda"):
            for each in groups:
                each.abort()
        forgotten.append(True)

    monkeypatch.setattr(c10d, "_coalescing_manager", batch)
    monkeypatch.setattr(c10d, "_abort_process_group", abort)
    monkeypatch.setattr(torch_private, "all_groups", lambda: groups)
    torch_private.abort_groups()
    assert forgotten == [True]
    assert all(each.aborts for each in groups)
    assert c10d._coalescing_manager is batch


def test_half_an_environment_is_named(no_launcher) -> None:
    no_launcher.setenv("RANK", "0")
    no_launcher.setenv("WORLD_SIZE", "2")
    no_launcher.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ProcessGroupError, match="MASTER_PORT is not set"), ht.process_group():
        pass
    no_launcher.setenv("MASTER_PORT", "1")
    no_launcher.setenv("RANK", "zero")
    with pytest.raises(ProcessGroupError, match="RANK='zero' is not a number"), ht.process_group():
        pass


def test_more_processes_than_gpus(no_launcher) -> None:
    no_launcher.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(ProcessGroupError, match="wants GPU 1, and this process sees 1"),
        ht.process_group(device="cuda:1"),
    ):
        pass


def run_bare(warm: Warm, *cases: str) -> dict[str, Any]:
    done = warm.run([SCRIPTS / "group_cases.py", *cases], timeout=150)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["case"] for each in found] == list(cases), done.stderr
    return {each["case"]: each for each in found}


def is_mean_of_all_ranks(replicated: dict[str, Any]) -> None:
    """The batches of two ranks are 1, 2, 3 and 4."""
    assert replicated["codes"] == [0, 0]
    for each in replicated["told"]:
        assert each == {"plain": True, "loss": pytest.approx(2.5), "gradient": pytest.approx(2.5)}
    assert len(replicated["told"]) == 2


def test_the_loss_of_a_mesh_is_the_mean_of_all_ranks(warm: Warm, torch_lacks: dict[str, str]) -> None:
    if torch_lacks["averages"]:
        pytest.skip(torch_lacks["averages"])
    is_mean_of_all_ranks(run_bare(warm, "replicated_over_a_mesh")["replicated_over_a_mesh"])


def test_two_ranks_that_nobody_watches(warm: Warm) -> None:
    """Nobody would end a rank that hangs."""
    found = run_bare(
        warm, "place", "trained", "sharded", "replicated", "own_group", "exits", "raises", "raises_late", "killed"
    )
    place = found["place"]["told"]
    assert sorted(each["rank"] for each in place if "rank" in each) == [0, 1]
    assert {each["total"] for each in place if "rank" in each} == {2}
    assert [each for each in place if "left" in each] == [{"left": True}] * 2
    assert found["own_group"]["told"].count({"kept": True}) == 2
    assert all("without DDP" in each["refused"] for each in found["sharded"]["told"])
    is_mean_of_all_ranks(found["replicated"])
    assert all(found[case]["codes"] == [0, 0] for case in ("place", "trained", "sharded", "own_group", "exits")), found
    assert found["raises"]["codes"] == [1, 1]
    assert found["raises_late"]["codes"] == [0, 1]
    assert found["raises_late"]["told"] == [{"left": True}] * 2
    assert found["killed"]["codes"] == [1, -9]


def test_operations_on_a_connection_that_gloo_does_not_read_any_more_are_ended(warm: Warm) -> None:
    """To cut the connection does not end them: gloo would not see it."""
    cases = ("lost_receive", "lost_receive_checked", "lost_receive_of_interfaces")
    for case, found in run_bare(warm, *cases).items():
        assert found["codes"] == [0, 0], case
        assert sorted(each["tag"] for each in found["told"]) == [2, 3], case
        assert all("timeout" in each["raised"] or "closed" in each["raised"].lower() for each in found["told"]), found


def test_a_store_that_is_kept_over_restarts_on_several_nodes(warm: Warm) -> None:
    """The dead group's addresses, and its word that all are done, are nobody's."""
    done = warm.run([SCRIPTS / "group_cases.py", "kept_store"], timeout=150)
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    assert [life["codes"] for life in lives] == [[0, 0], [0, 0]], done.stderr
    for life in lives:
        assert [each["total"] for each in life["told"][:2]] == [2, 2]
        assert life["told"][2:] == [{"slow": True}, {"left": True}], "rank 1 waits for rank 0 at the end"


def test_a_restart_under_torchrun(warm: Warm) -> None:
    """torchrun keeps its store, and with it the addresses of the first attempt."""
    line = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", SCRIPTS / "group_cases.py", "crashes_once"]
    done = warm.run([SCRIPTS / "under_torchrun.py", *line], timeout=150)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ['{"rank": 0, "total": 2}', '{"rank": 1, "total": 2}'], done


# --- guards: each warns once about its mistake and is silent about the correct code beside it -------------------------


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
    "a_closure_that_clears",
    "two_passes_one_backward",
    "something_unused",
    "loss_reduced",
    "best_of_common_loss",
}


@pytest.mark.usefixtures("fsdp_on_cpus")
def test_mistakes_and_correct_code_on_two_ranks(warm: Warm, tmp_path: Path) -> None:
    done = warm.run([SCRIPTS / "guard_cases.py"], cwd=tmp_path, timeout=150)
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


def test_iterators_from_which_nothing_is_drawn_are_no_passes(sampler) -> None:
    """torchdata's loader makes three for the rest of an epoch, and draws from the last one."""
    with guarded(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(2):
            sampler.set_epoch(epoch)
            *_, drawn = iter(sampler), iter(sampler), iter(sampler)
            assert len(list(drawn)) == 3


def test_a_warning_says_the_fix_and_how_to_switch_it_off(sampler) -> None:
    with guarded(), pytest.warns(ht.GuardWarning) as caught:
        draw(sampler, 4)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "sampler.set_epoch(epoch)" in text
    assert "HOLDFAST_GUARDS=0" in text
    assert caught[0].filename == __file__, "the line of the script"


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_off_by_the_variable(sampler, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOLDFAST_GUARDS", value)
    with warnings.catch_warnings(record=True) as caught, ht.process_group(device="cpu"), guarded():
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
    with guarded():
        assert DistributedSampler.__iter__ is not before[1]
    with pytest.raises(KeyError), guarded():
        raise KeyError
    assert (torch.save, DistributedSampler.__iter__, DistributedSampler.set_epoch) == before


def test_what_somebody_else_put_there_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", torch.save)  # put back at the end
    guard = guards.Guards(0, 2, None)
    theirs = object()
    with guard.connected():
        torch.save = theirs
    assert torch.save is theirs


def test_models_and_stores_of_earlier_worlds_are_let_go() -> None:
    """A function in ht.survive makes its model again after each regroup, and each world has its own store."""

    class Searching(nn.Linear):
        find_unused_parameters = True

    guard = guards.Guards(0, 2, dist.HashStore())
    let_go = []
    with guard.connected():
        for _ in range(3):
            model, store = Searching(2, 2), dist.HashStore()
            guard.renew(mistakes.SharedFacts(0, 2, store))
            guard.watch(model)
            assert model._forward_hooks
            let_go += [weakref.ref(model), weakref.ref(guard._board)]
        gc.collect()
        assert [each() is None for each in let_go] == [True] * 4 + [False] * 2
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not model.weight._post_accumulate_grad_hooks


class BrokenStore:
    """Its host is gone."""

    def add(self, *_arguments: object) -> int:
        raise RuntimeError("Connection reset by peer")

    set = check = multi_get = add


def test_a_store_that_is_gone_is_no_reason_to_stop() -> None:
    board = mistakes.SharedFacts(0, 2, BrokenStore())
    loss = mistakes.LossDiffers(lambda mistake, text: pytest.fail(text), board)
    loss.step(None)  # as a metric before the first evaluation
    loss.step("none yet")
    for _ in range(5):
        loss.step(1.0)
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
        zero.step(first)
        one.step(second)
    assert bool(told) is not same


# --- accumulation: the gradient of an optimizer step is the mean over its samples, however it is cut up ---------------


@dataclass
class Dealt:
    """A loader as accumulate sees one."""

    share: Share | None = None
    every: int = 1


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters()])


@pytest.fixture
def whole() -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model, 10 rows, their mean loss and its gradients."""
    torch.manual_seed(0)
    model, rows = nn.Linear(4, 3), torch.randn(10, 4)
    reference = copy.deepcopy(model)
    loss = loss_of(reference, rows)
    loss.backward()
    return model, rows, loss.detach(), gradients(reference)


def test_equal_micro_batches(whole) -> None:
    model, rows, loss, expected = whole
    lasts = []
    for part in rows.split(2):
        with ht.accumulate(model, micro_batches=5) as micro:
            micro.backward(loss_of(model, part))
        lasts.append(micro.last)
    assert lasts == [False] * 4 + [True]
    torch.testing.assert_close(gradients(model), expected)
    torch.testing.assert_close(micro.loss, loss)
    assert not micro.loss.requires_grad


def test_a_loader_tells_how_much_each_batch_weighs(whole) -> None:
    model, rows, loss, expected = whole
    loader = Dealt()
    sizes = []
    for share in GlobalBatch.kept(10, 1, 3).deal(0, 0, 10):
        loader.share = share
        part = rows[share.start : share.stop]
        sizes.append(len(part))
        with ht.accumulate(model, loader) as micro:
            micro.backward(loss_of(model, part))
    assert sorted(sizes) == [2, 2, 3, 3]
    assert micro.last
    torch.testing.assert_close(gradients(model), expected)
    torch.testing.assert_close(micro.loss, loss)


@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_two_blocks_for_one_batch_add_up_in_any_world(batch_size: int) -> None:
    """As of a GAN's discriminator: how many micro-batches a step has depends on the number of ranks."""
    rows = TensorDataset(torch.arange(1.0, 9.0).reshape(8, 1))
    loader = ht.DataLoader(rows, batch_size=batch_size, global_batch_size=4, shuffle=False)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    seen = []
    for (part,) in loader:
        for weight in (1.0, 10.0):
            with ht.accumulate(model, loader) as micro:
                micro.backward(weight * model(part).mean())
        if micro.last:
            assert model.weight.grad is not None
            seen.append((model.weight.grad.item(), micro.loss.item()))
            model.zero_grad()
    assert seen == [(27.5, 27.5), (71.5, 71.5)]


@pytest.mark.parametrize("how", ["read ahead", "skipped"])
def test_micro_batches_that_are_left_out_are_noticed(how: str) -> None:
    """By what reads a batch ahead of the loop, or by a `continue`."""
    rows = TensorDataset(torch.arange(1.0, 9.0).reshape(8, 1))
    loader = ht.DataLoader(rows, batch_size=1, global_batch_size=4, shuffle=False)
    model = nn.Linear(1, 1, bias=False)

    def train() -> None:
        read_ahead = (first for first, _ in itertools.pairwise(loader))
        for number, (part,) in enumerate(read_ahead if how == "read ahead" else loader):
            if how == "read ahead" or number != 1:
                with ht.accumulate(model, loader) as micro:
                    micro.backward(model(part).mean())

    with pytest.warns(guards.GuardWarning, match="the gradient lacks the samples"):
        train()


def test_two_blocks_for_one_batch_that_may_be_repeated_are_refused() -> None:
    rows = TensorDataset(torch.arange(1.0, 9.0).reshape(8, 1))
    loader = ht.DataLoader(rows, batch_size=4, global_batch_size=4, shuffle=False, shrink_on_oom=True)
    model = nn.Linear(1, 1)
    next(iter(loader))
    with ht.accumulate(model, loader):
        pass
    with (
        pytest.raises(ProcessGroupError, match="one block of ht"),
        ht.accumulate(model, loader),
    ):
        pass


def test_the_loss_before_the_last_is_the_mean_so_far() -> None:
    model = nn.Linear(1, 1)
    seen = []
    for value in (1.0, 3.0, 8.0):
        with ht.accumulate(model, micro_batches=3) as micro:
            micro.backward(model.weight.sum() * 0 + value)
        seen.append(micro.loss.item())
    assert seen == pytest.approx([1.0, 2.0, 4.0])
    with ht.accumulate(model, micro_batches=3) as micro:
        assert micro.loss.isnan()


def test_the_next_step_begins_anew() -> None:
    model = nn.Linear(1, 1)
    for value in (1.0, 5.0, 7.0, 9.0):
        with ht.accumulate(model, micro_batches=2) as micro:
            micro.backward(model.weight.sum() * 0 + value)
    assert micro.loss.item() == pytest.approx(8.0)


def test_a_failed_micro_batch_does_not_count() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ZeroDivisionError), ht.accumulate(model, micro_batches=2):
        raise ZeroDivisionError
    with ht.accumulate(model, micro_batches=2) as micro:
        assert micro.number == 0


def test_a_gradient_scaler(whole) -> None:
    model, rows, loss, expected = whole
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for part in rows.split(5):
        with ht.accumulate(model, micro_batches=2) as micro:
            micro.backward(loss_of(model, part), scaler=scaler)
    torch.testing.assert_close(gradients(model), expected * 8)
    torch.testing.assert_close(micro.loss, loss)


def test_a_step_that_the_loop_has_left_is_begun_again_without_its_gradients() -> None:
    """Its micro-batches come again."""
    model = nn.Linear(1, 1, bias=False)
    loader = ht.DataLoader(torch.ones(12, 1), 2, global_batch_size=6, resumable=True)
    for number, rows in enumerate(loader):
        with ht.accumulate(model, loader) as micro:
            micro.backward(model(rows).mean())
        loader.trained()
        if number == 1:
            break
    for rows in loader:
        with ht.accumulate(model, loader) as micro:
            micro.backward(model(rows).mean())
        if micro.last:
            break
    assert model.weight.grad is not None
    assert model.weight.grad.item() == pytest.approx(1.0)


def test_what_cannot_be_accumulated() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ProcessGroupError, match="at least one"), ht.accumulate(model, micro_batches=0):
        pass
    with pytest.raises(ProcessGroupError, match="no batch yet"), ht.accumulate(model, Dealt()):
        pass


def test_a_model_is_not_kept_alive() -> None:
    model = nn.Linear(1, 1)
    with ht.accumulate(model) as micro:
        micro.backward(model.weight.sum())
    gone = weakref.ref(model)
    del model, micro
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("fsdp_on_cpus")
def test_resizes_leave_the_loss_curve_as_it_is(warm: Warm) -> None:
    """DDP on 2, 3, 4, 1 ranks and FSDP2 on 4, 2, 3, as one process undisturbed; epochs with uneven tails."""
    curves = warm.found(SCRIPTS / "loss_curves.py", "resized", timeout=170)
    assert len(curves["undisturbed"]) == 16
    assert curves["ddp"] == pytest.approx(curves["undisturbed"], rel=1e-5)
    assert curves["fsdp"] == pytest.approx(curves["undisturbed"], rel=1e-5)

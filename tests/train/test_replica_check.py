"""Replicas are compared while they train: a bit that flips in one of them is found at the next check, and nothing else."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast.protocol.errors import IntervalError, ProcessGroupError, ReplicasDifferError
from holdfast.train import check_replicas, replica_check
from holdfast.train.replica_check import Replica, ReplicaAction, ReplicaCheck
from tests.warm import Warm

SCRIPT = Path(__file__).parent / "scripts" / "checked_ranks.py"
pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.timeout(300)]


class Net(nn.Module):
    """Dropout and BatchNorm, which differ on each rank; a table, and a frozen parameter, which do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.3)
        self.last = nn.Linear(9, 2)
        self.register_buffer("table", torch.linspace(0, 1, 7), persistent=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.drop(torch.relu(self.norm(self.first(inputs))))
        return self.last(hidden) * self.table[3] * self.frozen[0]


class InProcess:
    """Ranks that are threads of this process: each has a model, and all step with the mean of their gradients."""

    def __init__(self, world: int, seed: int, every: int = 1) -> None:
        torch.manual_seed(seed)
        first = Net()
        self.models = [copy.deepcopy(first) for _ in range(world)]
        self.optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in self.models]
        self.world, self.store = world, dist.HashStore()
        self.checks = [
            ReplicaCheck(Replica(each), (), every, ReplicaAction.EXIT, lambda steps: steps) for each in self.models
        ]
        for rank, each in enumerate(self.checks):
            each.begin(0, rank, world, self.store)

    def backward(self) -> None:
        for rank, model in enumerate(self.models):
            model(torch.randn(4 + rank, 6)).square().mean().backward()
        for several in zip(*(each.parameters() for each in self.models), strict=True):
            if several[0].grad is not None:
                mean = sum(each.grad for each in several) / self.world
                for each in several:
                    each.grad = mean.clone()

    def step(self, threads: ThreadPoolExecutor) -> list[str]:
        """A step of all ranks. Returns what each has raised; empty: nothing."""
        self.backward()

        def one(rank: int) -> str:
            try:
                self.checks[rank].before_step(self.optimizers[rank])
            except ReplicasDifferError as error:
                return str(error)
            self.optimizers[rank].step()
            self.optimizers[rank].zero_grad()
            return ""

        return list(threads.map(one, range(self.world)))

    def places(self, rank: int) -> dict[str, torch.Tensor]:
        """All that has to be equal, by name."""
        check = self.checks[rank]
        return {
            name: each for part in check.replica.sections(check._optimizers()) for name, each in part.tensors.items()
        }


def flip(tensor: torch.Tensor, chance: random.Random) -> None:
    """Flip a bit as faulty memory does: torch does not count it as a change."""
    raw = tensor.data.view(-1).view(torch.uint8)
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_bit_that_flips_in_one_replica_is_found_and_named(world: int, threads: ThreadPoolExecutor) -> None:
    chance = random.Random(world)
    kinds = set()
    for seed in range(40):
        job = InProcess(world, seed)
        for _ in range(2):
            assert job.step(threads) == [""] * world
        odd = chance.randrange(world)
        places = sorted(job.places(odd).items())
        name, tensor = places[seed % len(places)]
        kinds.add(name.rpartition(".")[2])
        flip(tensor, chance)
        others = [rank for rank in range(world) if rank != odd]
        for said in job.step(threads):
            assert f"in {name}\n" in said
            assert "after step 2: " in said
            assert (f"rank {odd} differs from rank" if world > 2 else "rank 0 and rank 1 differ") in said
            assert ("there is no majority" in said) == (world == 2)
            assert all(f"rank {rank} runs on" not in said for rank in others) or world == 2
    assert {"weight", "bias", "exp_avg", "exp_avg_sq", "step", "table", "frozen"} <= kinds


def test_nothing_is_found_in_many_checks_of_a_sound_training(threads: ThreadPoolExecutor) -> None:
    job = InProcess(3, 1)
    kept = []
    for _ in range(300):
        assert job.step(threads) == [""] * 3
        kept.append(job.store.num_keys())
    assert max(kept) == kept[1], "no message stays in the store"
    assert not torch.equal(job.models[0].norm.running_mean, job.models[1].norm.running_mean)
    assert [each.steps for each in job.checks] == [299] * 3


def test_a_check_comes_after_the_first_step_and_after_every_so_many(threads: ThreadPoolExecutor) -> None:
    job = InProcess(2, 1, every=4)
    assert job.step(threads) == ["", ""]
    job.models[1].last.bias.data[0] += 1
    assert "after step 1: " in job.step(threads)[0]
    job = InProcess(2, 1, every=4)
    for _ in range(2):
        job.step(threads)
    job.models[1].last.bias.data[0] += 1
    for _ in range(2):
        assert job.step(threads) == ["", ""]
    assert "after step 4: " in job.step(threads)[0]


def test_several_optimizers_make_one_step(threads: ThreadPoolExecutor) -> None:
    """The state between their steps is never compared."""
    job = InProcess(2, 1)
    split = [
        (torch.optim.SGD(each.first.parameters(), lr=0.1), torch.optim.Adam(each.last.parameters()))
        for each in job.models
    ]
    counts = []
    for _ in range(5):
        for which in range(2):
            job.optimizers = [each[which] for each in split]
            assert job.step(threads) == ["", ""]
        counts.append(job.checks[0].steps)
    assert counts == [0, 1, 2, 3, 4]


def test_a_buffer_that_the_program_changes_belongs_to_its_rank(threads: ThreadPoolExecutor) -> None:
    job = InProcess(3, 1)
    job.step(threads)
    job.models[1].table.add_(1)
    for _ in range(4):
        assert job.step(threads) == ["", "", ""]


def test_a_buffer_is_compared_once_it_was_found_equal(threads: ThreadPoolExecutor) -> None:
    chance = random.Random(1)
    job = InProcess(3, 1)
    flip(job.models[0].table, chance)
    for _ in range(4):
        assert job.step(threads) == ["", "", ""], "it may be that rank's own"
    job = InProcess(3, 1)
    for _ in range(2):
        job.step(threads)
    flip(job.models[0].table, chance)
    assert all("rank 0 differs from ranks 1 and 2 in model.table" in each for each in job.step(threads))


def test_a_buffer_that_most_ranks_change_unseen_is_no_difference(threads: ThreadPoolExecutor) -> None:
    """An operation writes to it, and torch does not count that, as with the averages of BatchNorm."""
    job = InProcess(3, 1)
    for _ in range(3):
        job.step(threads)
    for number in range(4):
        for rank in range(2):
            job.models[rank].table.data[0] = number + rank + 1
        assert job.step(threads) == ["", "", ""]


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_check, "SILENCE_S", seconds)
        patch.setattr("holdfast.train.agreement.RANK_0_FIRST_S", 0.1)
        yield


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_rank_that_is_a_step_behind_is_not_compared_with_a_later_step(ahead: int) -> None:
    """One rank does four more steps alone: it waits for the other's state of the same step, and is never given another."""
    job = InProcess(2, 1)
    with patience(0.05), ThreadPoolExecutor(2) as pool:
        assert job.step(pool) == ["", ""]
        for _ in range(2):
            job.backward()
            job.checks[ahead].before_step(job.optimizers[ahead])  # nobody answers
            job.optimizers[ahead].step()
        assert job.checks[ahead].steps == 2
        job.checks[1 - ahead].before_step(job.optimizers[1 - ahead])
        assert job.checks[1 - ahead].steps == 1


def test_ranks_that_never_meet_stop_to_wait() -> None:
    job = InProcess(2, 1)
    alone, optimizer = job.checks[0], job.optimizers[0]
    with patience(0.01):
        for _ in range(1 + replica_check.SILENT_MAX - 1):
            alone.before_step(optimizer)
        with pytest.warns(RuntimeWarning, match="not compared any more: rank 1 sent nothing"):
            alone.before_step(optimizer)
        steps = alone.steps
        alone.before_step(optimizer)
        assert alone.steps == steps


def test_a_state_that_cannot_be_read_ends_the_checks_and_not_the_training(threads: ThreadPoolExecutor) -> None:
    job = InProcess(2, 1)
    job.step(threads)
    job.optimizers[1].state[job.models[1].last.weight]["more"] = torch.empty(3, device="meta")
    with pytest.warns(RuntimeWarning, match="not compared any more: rank 1 cannot read its state"):
        assert job.step(threads) == ["", ""]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"every": 0}, IntervalError),
        ({"every": True}, IntervalError),
        ({"action": "mend"}, ProcessGroupError),
        ({}, ProcessGroupError),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="check_replicas"):
        check_replicas(nn.Linear(2, 2), **options)


# --- real ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_flipped_bit_is_found_at_the_next_check_by_all_ranks(
    warm: Warm, world: int, torch_lacks: dict[str, str]
) -> None:
    found = warm.found(SCRIPT, "flips", str(world))
    assert set(found) == {"parameter", "momentum", "buffer"}
    if torch_lacks["constant buffers"]:
        assert found.pop("buffer") == ["nothing was found"] * world
    names = {
        "parameter": "model.last.weight",
        "momentum": "optimizer.state.last.weight.exp_avg",
        "buffer": "model.table",
    }
    odd = world - 1
    others = {2: "rank 0 and rank 1 differ", 3: "rank 2 differs from ranks 0 and 1"}
    who = others.get(world, "rank 3 differs from ranks 0, 1 and 2")
    for place, said in found.items():
        assert len(said) == world
        for each in said:
            assert each.startswith("HF414 ReplicasDifferError after 4 steps: the replicas of Net differ after step 4: ")
            assert f"{who} in {names[place]}\n" in each
            assert f"rank {odd} runs on " in each


def test_ht_ddp_reports_on_each_node_what_differs_and_trains_on(warm: Warm) -> None:
    for said, steps in warm.found(SCRIPT, "default"):
        assert steps == 6
        assert len(said) == 1
        assert "rank 1 differs from ranks 0 and 2 in model.first.bias" in said[0]
        assert "after step 1: " in said[0]


def test_what_differs_takes_the_state_of_the_majority(warm: Warm) -> None:
    found = warm.found(SCRIPT, "repaired")
    for said, _, _ in found["majority"]:
        assert len(said) == 1
        assert "rank 2 differs from ranks 0 and 1 in model.first.weight" in said[0]
        assert "They were given the state of the majority" in said[0]
    assert len({str(state) for _, _, state in found["majority"]}) == 1
    assert [steps for _, steps, _ in found["majority"]] == [8, 8, 8]
    for said in found["none"]:
        assert "rank 0 and rank 1 differ in model.first.weight" in said
        assert "no majority" in said


def test_what_belongs_to_each_rank_is_no_difference(warm: Warm, torch_lacks: dict[str, str]) -> None:
    found = warm.found(SCRIPT, "healthy")
    for kind in ("fsdp", "hsdp") if torch_lacks["fsdp"] else ():
        assert all("'Stream' object has no attribute" in each["error"] for each in found.pop(kind))
    assert {name: [each["said"] for each in ranks] for name, ranks in found.items()} == {
        name: [[]] * 4 for name in found
    }
    assert all(each["checks"] == 39 for ranks in found.values() for each in ranks)


@pytest.mark.usefixtures("fsdp_on_cpus")
def test_shards_are_compared_with_their_replicas_alone(warm: Warm) -> None:
    for said in warm.found(SCRIPT, "sharded"):
        assert "rank 1 and rank 3 differ in model.first.weight" in said


def test_in_join_nothing_is_compared_and_rank_0_says_so(warm: Warm) -> None:
    said = warm.found(SCRIPT, "joined")
    assert ["it is in join()" in " ".join(each) for each in said] == [True, False, False]
    assert not any("differ" in text for each in said for text in each if "join()" not in text)


def test_states_in_memory_since_the_last_save_are_not_written_after_a_difference(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, "saved", str(tmp_path))
    assert all("differ after step 4: rank 1 differs from ranks 0 and 2" in each for each in found["said"])
    assert (found["steps"], found["resumed"]) == ([2], [2, 2, 2])

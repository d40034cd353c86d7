"""The process group: however the process was started, and however it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast.train as ht
from holdfast.protocol.errors import ProcessGroupError
from tests.warm import Warm

SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = [pytest.mark.xdist_group("torch"), pytest.mark.timeout(180)]


def test_every_name_is_there_and_hides_no_module() -> None:
    assert sorted(ht._HOMES) == list(ht.__all__)
    for name in ht.__all__:
        assert getattr(ht, name).__name__ == name
        assert f"{ht.__name__}.{name}" not in sys.modules


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
    done = warm.run([SCRIPTS / "bare_ranks.py", *cases], timeout=150)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["case"] for each in found] == list(cases), done.stderr
    return {each["case"]: each for each in found}


def test_two_ranks_that_nobody_watches(warm: Warm) -> None:
    """Nobody would end a rank that hangs."""
    found = run_bare(warm, "place", "trained", "sharded", "own_group", "exits", "raises", "raises_late", "killed")
    place = found["place"]["told"]
    assert sorted(each["rank"] for each in place if "rank" in each) == [0, 1]
    assert {each["total"] for each in place if "rank" in each} == {2}
    assert [each for each in place if "left" in each] == [{"left": True}] * 2
    assert found["own_group"]["told"].count({"kept": True}) == 2
    assert all("without DDP" in each["refused"] for each in found["sharded"]["told"])
    assert all(found[case]["codes"] == [0, 0] for case in ("place", "trained", "sharded", "own_group", "exits")), found
    assert found["raises"]["codes"] == [1, 1]
    assert found["raises_late"]["codes"] == [0, 1]
    assert found["raises_late"]["told"] == [{"left": True}] * 2
    assert found["killed"]["codes"] == [1, -9]


def test_a_store_that_is_kept_over_restarts_on_several_nodes(warm: Warm) -> None:
    """The dead group's addresses, and its word that all are done, are nobody's."""
    done = warm.run([SCRIPTS / "bare_ranks.py", "kept_store"], timeout=150)
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

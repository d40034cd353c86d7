"""How a job ends: exit codes and error files beside torchrun's."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

import pytest

from tests.beside_torchrun.beside import PROBE, SCRIPTS, Launchers, Line, Side
from tests.support.limits import limit_s

FAILS = str(SCRIPTS / "fails.py")

ENDINGS = [
    # What the worker does, torchrun's exit code, ours: the worker's own.
    ("exit 0", 0, 0),
    ("exit 1", 1, 1),
    ("exit 5", 1, 5),
    ("exit text", 1, 1),
    ("raise", 1, 1),
    ("abrupt 7", 1, 7),
    ("kill 9", 1, 128 + 9),
    ("kill 11", 1, 128 + 11),
    ("kill 15", 1, 128 + 15),
]


@pytest.mark.parametrize(("ending", "theirs_code", "ours_code"), ENDINGS)
def test_exit_codes(launchers: Launchers, ending: str, theirs_code: int, ours_code: int) -> None:
    theirs, ours = launchers.pair("--log-dir", "{logs}", FAILS, *ending.split())
    assert (theirs.code, ours.code) == (theirs_code, ours_code), f"{theirs}\n{ours}"


def test_the_error_file_of_record(launchers: Launchers) -> None:
    """torch's own decorator writes it, under both, and the agent's own error file gets the first failure's."""
    env = {"TORCHELASTIC_ERROR_FILE": "{logs}/agent.json"}
    theirs, ours = launchers.pair("--log-dir", "{logs}", "-m", "fails_recorded", "raise", env=env)
    assert (theirs.code, ours.code) == (1, 1), f"{theirs}\n{ours}"
    left, right = error_files(theirs), error_files(ours)
    assert left.keys() == right.keys()
    for name in left:
        assert_same_error(left[name], right[name])


def test_the_error_file_without_record(launchers: Launchers) -> None:
    """torchrun writes none; ours is the one that `record` would have written."""
    ours = launchers.holdfast(Line(["--log-dir", "{logs}", FAILS, "raise"])).finish()
    theirs = launchers.torchrun(Line(["--log-dir", "{logs}", str(SCRIPTS / "fails_recorded.py"), "raise"])).finish()
    (left,), (right,) = error_files(theirs).values(), error_files(ours).values()
    assert_same_error(left, right)


@pytest.mark.parametrize("ending", ["exit 3", "kill 9"])
def test_no_error_file_where_nothing_was_raised(launchers: Launchers, ending: str) -> None:
    for side in launchers.pair("--log-dir", "{logs}", FAILS, *ending.split()):
        assert error_files(side) == {}


def error_files(side: Side) -> dict[str, Any]:
    """By their place below the run folder; the agent's own is beside the run folders."""
    found = {"/".join(path.relative_to(side.logs).parts[1:]): path for path in side.logs.rglob("error.json")}
    if (side.logs / "agent.json").exists():
        found["agent"] = side.logs / "agent.json"
    return {name: json.loads(path.read_text()) for name, path in found.items()}


def assert_same_error(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Key by key: all but the frames and the second."""
    assert shape(theirs) == shape(ours)
    left, right = theirs["message"], ours["message"]
    assert left["message"] == right["message"] == "WrongError: it is wrong:\nähm"
    assert left.get("errorCode") == right.get("errorCode")
    assert abs(int(right["extraInfo"]["timestamp"]) - time.time()) < limit_s(60)
    for side in (left, right):
        stack = side["extraInfo"]["py_callstack"]
        assert stack.startswith("Traceback (most recent call last):\n")
        assert stack.rstrip().endswith("WrongError: it is wrong:\nähm")
        assert 'raise WrongError("it is wrong:\\nähm")' in stack


def shape(value: object) -> object:
    return {name: shape(item) for name, item in value.items()} if isinstance(value, dict) else type(value).__name__


def test_launch(launchers: Launchers) -> None:
    """torch.distributed.launch: the argument --local-rank is first, unless --use-env."""
    lines = [
        "--nproc-per-node 2 {probe} a ${local_rank}",
        "--use-env --nproc_per_node 2 {probe} a",
        "--use_env -m probe",
    ]
    for line in lines:
        (theirs,), (ours,) = launchers.both(Line(shlex.split(line.replace("{probe}", PROBE)), module="launch"))
        assert (theirs.code, ours.code) == (0, 0), f"{theirs}\n{ours}"
        assert arguments(ours) == arguments(theirs)
        assert "FutureWarning" in theirs.err
        assert "FutureWarning" in ours.err
    refused = Line(["--no-python", "echo"], module="launch")
    (theirs,), (ours,) = launchers.both(refused)
    assert (theirs.code, ours.code) == (1, 2)


def test_launch_of_a_module(launchers: Launchers) -> None:
    (theirs,), (ours,) = launchers.both(Line(["-m", "probe", "b"], module="launch"))
    assert arguments(ours) == arguments(theirs)
    assert arguments(ours)["0.0"][1:] == ["--local-rank=0", "b"]


def arguments(side: Side) -> dict[str, list[str]]:
    return {name: probe["argv"] for name, probe in side.probes().items()}


# --- `--event-log-handler console` beside torchrun: the same keys, and the same story ---------------------------------


def events(side: Side) -> list[dict[str, Any]]:
    assert side.code == 0, side
    return [json.loads(text) for text in side.err.splitlines() if text.startswith('{"name"')]


def place(event: dict[str, Any]) -> tuple[str, int]:
    return event["name"] + event["source"], event["metadata"]["global_rank"] or 0


def test_the_same_events_with_the_same_keys(launchers: Launchers) -> None:
    line = ["--standalone", "--nproc-per-node", "2", "--event-log-handler", "console", "--log-dir", "{logs}"]
    theirs, ours = map(events, launchers.pair(*line, str(SCRIPTS / "empty.py")))

    def stories(told: list[dict[str, Any]]) -> dict[tuple[str, int], list[str]]:
        """Of the agent and of each worker, in order: the first worker may have ended before the second one starts."""
        found: dict[tuple[str, int], list[str]] = {}
        for each in told:
            found.setdefault((each["source"], each["metadata"]["global_rank"] or 0), []).append(each["name"])
        return found

    assert stories(ours) == stories(theirs)
    ours.sort(key=place)  # workers end in any order
    theirs.sort(key=place)
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine) == list(other)
        assert list(mine["metadata"]) == list(other["metadata"])
        known = json.loads(other["metadata"]["metadata"])
        own = json.loads(mine["metadata"]["metadata"])
        assert [key for key in own if key in known] == list(known)
        assert own.keys() - known.keys() <= {"exit_code", "worker_pid"}  # torch 2.9 has neither
        for key in ("global_rank", "group_rank", "role", "state", "rdzv_backend", "agent_restarts"):
            assert mine["metadata"][key] == other["metadata"][key], key

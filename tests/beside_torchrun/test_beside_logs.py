"""-r, -t and the filters: the files that torchrun makes are there with the same content, and the console shows the same lines.

Holdfast keeps more: both streams of every worker, the journal and the verdict. Without -t it names the rank before a
line, where torchrun's workers write to the console by themselves.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.beside_torchrun.beside import SCRIPTS, Launchers, Side
from tests.support.tables import tables

TABLES = tables(__file__)

TALK = str(SCRIPTS / "talk.py")

OURS_ONLY = re.compile(r"(attempt_\d/\d/(stdout|stderr)\.log|events\.jsonl|verdict\.json)$")
"""Files in a run folder that torchrun would not have made."""
NODE_RANK = re.compile(r"^[\w.-]+:\d+\| ")
"""What is before a line that is not teed."""
TORN = re.compile(r"\[default\d\]:.*\[default\d\]:")
"""torchrun's threads write a prefix and its line one after the other, and another rank's in between."""
TORN_RUNS_MAX = 5
SAID = re.compile(r"^([WI]1?\d+ \d\d:|holdfast: )")
"""Lines of the launchers themselves."""

LINES = TABLES["log_lines"]


@pytest.mark.parametrize(("line", "env"), LINES)
def test_files_and_console(launchers: Launchers, line: str, env: dict[str, str]) -> None:
    argv = ["--nproc-per-node", "2", "--log-dir", "{logs}", *shlex.split(line), TALK]
    theirs, ours = untorn(launchers, *argv, env={"OMP_NUM_THREADS": "1", **env})
    assert (theirs.code, ours.code) == (0, 0), f"{theirs}\n{ours}"
    assert_files_kept(theirs, ours)
    assert shown(ours.out) == shown(theirs.out)
    assert shown(ours.err) == shown(theirs.err)


def test_a_folder_for_each_try(launchers: Launchers) -> None:
    theirs, ours = untorn(launchers, *shlex.split("--log-dir {logs} --max-restarts 1 -t 3"), TALK, "fail")
    assert (theirs.code, ours.code) == (0, 0), f"{theirs}\n{ours}"
    assert "attempt_1/0/stdout.log" in theirs.tree()
    assert_files_kept(theirs, ours)
    assert shown(ours.out) == shown(theirs.out)


def test_no_files(launchers: Launchers) -> None:
    theirs, ours = untorn(launchers, "--log-dir", "/dev/null", "--nproc-per-node", "2", "-t", "3", TALK)
    assert (theirs.code, ours.code) == (0, 0), f"{theirs}\n{ours}"
    assert not theirs.logs.exists()
    assert not ours.logs.exists()
    # Workers write to the console by themselves, and unbuffered, as with torchrun: a text and the end of its line are two
    # writes, and another rank's may come between them.
    texts = set(shown(theirs.out))
    assert {text: ours.out.count(text) for text in texts} == {text: theirs.out.count(text) for text in texts}


def test_the_run_folder(launchers: Launchers) -> None:
    """`<run id>_<8 random>`, for its owner only, in a folder that is made where it is missing; c10d keeps --rdzv-id."""
    argv = shlex.split("--log-dir {logs}/a/b --rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id my.job")
    for side in launchers.pair(*argv, TALK):
        (run,) = (side.logs / "a" / "b").iterdir()
        assert re.fullmatch(r"my\.job_[a-z0-9_]{8}", run.name), run
        assert run.stat().st_mode & 0o777 == 0o700


def test_nothing_in_tmp(launchers: Launchers, tmp_path: Path) -> None:
    """Without --log-dir torchrun leaves a folder in /tmp; ours is in the user's state folder."""
    env = {"TMPDIR": "{folder}", "XDG_STATE_HOME": str(tmp_path / "state")}
    theirs, ours = launchers.pair("-r", "3", TALK, env=env)
    assert (theirs.code, ours.code) == (0, 0), f"{theirs}\n{ours}"
    assert {path.name for path in ours.folder.iterdir()} == {"probes", "stdout", "stderr"}
    assert len(list((tmp_path / "state" / "holdfast" / "runs").iterdir())) == 1
    assert [path.name for path in theirs.folder.glob("torchelastic_*")] != []


def assert_files_kept(theirs: Side, ours: Side) -> None:
    left, right = theirs.tree(), ours.tree()
    lost = {
        name: (text, right.get(name)) for name, text in left.items() if same(name, text) != same(name, right.get(name))
    }
    assert lost == {}
    more = [name for name in right.keys() - left.keys() if not OURS_ONLY.search(name)]
    assert more == []


def same(name: str, text: str | None) -> object:
    """The lines of several ranks are in no order."""
    return lines(text) if text is not None and "filtered" in name else text


def untorn(launchers: Launchers, *argv: str, **more: Any) -> tuple[Side, Side]:
    """Both, where torchrun has shown whole lines. Ours has to every time. Like lines are compared one by one."""
    more["env"] = {**more.get("env", {}), "HOLDFAST_NO_DEDUP": "1"}
    for _ in range(TORN_RUNS_MAX):
        theirs, ours = launchers.pair(*argv, **more)
        assert not any(TORN.search(line) for text in (ours.out, ours.err) for line in lines(text)), ours
        if not any(TORN.search(line) for text in (theirs.out, theirs.err) for line in lines(text)):
            return theirs, ours
        launchers.again()
    raise AssertionError(f"torchrun tears lines each time: {theirs}")


def shown(text: str) -> list[str]:
    """Lines on the console without what the launchers say and without our prefix."""
    return sorted(line for line in (NODE_RANK.sub("", line) for line in lines(text)) if line and not SAID.match(line))


def lines(text: str) -> list[str]:
    """In no order between ranks. What ends without a newline runs into the next line under torchrun, so it is cut there."""
    cut = text.replace("ends without a newline", "ends without a newline\n")
    return sorted(line for line in cut.splitlines() if line)

"""`holdfast report`: from journals to rows, and what it says to a folder that is no run's. `holdfast explain`: every code
that can be printed is explained, offline; unknown ones name the nearest."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main, run_command
from holdfast.cli.report import safe_text
from holdfast.diagnosis.causes.find import advice, rules
from holdfast.diagnosis.history import history, incidents, timeline
from holdfast.diagnosis.reference import (
    events,
    explanations,
    headings,
    nearest_codes,
    normal_code,
    search,
    verdict_texts,
)
from holdfast.runs.copies_report import copies_of
from holdfast.runs.journal_reader import read_journal
from tests.support.documents import checked
from tests.support.limits import limit_s

SOURCE = Path(__file__).resolve().parent.parent.parent / "src" / "holdfast"
PHASES = {
    "form_s": 0.02,
    "spawn_s": 0.01,
    "import_s": 2.5,
    "store_s": 0.02,
    "process_group_s": 0.03,
    "first_step_s": 0.5,
}


def journal(folder: Path, *events: dict[str, Any], torn: str = "") -> str:
    folder.mkdir()
    lines = [json.dumps({"time": 1000.0 + number, "monotonic": 1.0, **event}) for number, event in enumerate(events)]
    (folder / "events.jsonl").write_text("".join(line + "\n" for line in lines) + torn)
    return str(folder)


def begins(node: str, run_id: str = "job") -> dict[str, Any]:
    return {"event": "begins", "member": f"{node}#ab", "run_id": run_id}


def phases(generation: int, **more: float) -> dict[str, Any]:
    return {"event": "phases", "generation": generation, "restart_count": 0, **PHASES, **more}


@pytest.fixture
def two_nodes(tmp_path: Path) -> list[str]:
    one = journal(
        tmp_path / "one",
        begins("a"),
        {"event": "preload", "modules": ["torch"], "later": [], "why": "so"},
        {"event": "preload", "text": "imported torch in 0.70 s", "trouble": False},
        {"event": "coordinator.assigned", "generation": 1, "world_size": 4},
        phases(1),
        {"event": "standby", "pids": [5, 6], "own_bytes": 2 * 2**20},
        {"event": "coordinator.lost", "member": "c#1", "reason": "silent for more than 6 s", "silent_s": 6.25},
        {"event": "coordinator.stopping", "generation": 1, "reason": "member_lost", "text": "c was lost"},
        {"event": "coordinator.assigned", "generation": 2, "world_size": 2},
        phases(2, stop_s=0.004),
        {"event": "ended", "kind": "succeeded", "exit_code": 0},
    )
    two = journal(tmp_path / "two", begins("b"), phases(1, import_s=3.0), phases(2, stop_s=0.1), torn='{"event": "hal')
    return [one, two]


def saved_in(page: str) -> Any:
    """The data in a page of --html."""
    found = re.search(r'<script type="application/json" id="saved">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_rows_of_the_slowest_node(two_nodes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *two_nodes]) == 0
    head, *facts, first, second = capsys.readouterr().out.splitlines()
    assert head == "run job on a, b: 2 generations, ended: succeeded, exit code 0"
    assert facts[:2] == [
        "preloaded: imported torch in 0.70 s",
        "standby: 2 workers parked, 2.0 MiB of their own",
    ]
    heading, first, second = (" ".join(row.split()) for row in (facts[-1], first, second))
    assert heading == "GEN BEGAN RANKS DETECT STOP FORM SPAWN IMPORT STORE GROUP STEP 1 TOTAL WHY"
    assert first.endswith(" 4 0.020 0.010 3.000 0.020 0.030 0.500 3.580 start")
    assert second.endswith(" 2 6.250 0.100 0.020 0.010 2.500 0.020 0.030 0.500 9.430 c was lost")


@pytest.mark.parametrize(
    ("reason", "code", "cause", "shown"),
    [
        ("worker_failed", "HF205", "rank 3 on b raised KeyError", "rank 3 on b raised KeyError"),
        ("hung", "HF242", "rank 3 on b is stopped", "rank 3 on b is stopped"),
        ("worker_failed", "HF200", "the generation ended although no worker failed", "rank 0 on a ended"),
        ("member_joined", "HF210", "rank 3 on b lost its peers", "rank 0 on a ended"),
    ],
)
def test_a_generation_began_because_of_the_culprit_and_not_of_the_first_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: str, code: str, cause: str, shown: str
) -> None:
    folder = journal(
        tmp_path / "one",
        begins("a"),
        {"event": "coordinator.assigned", "generation": 1, "world_size": 4},
        phases(1),
        {"event": "coordinator.stopping", "generation": 1, "reason": reason, "text": "rank 0 on a ended"},
        {"event": "coordinator.verdict", "generation": 1, "code": code, "cause": cause, "advice": ""},
        {"event": "coordinator.assigned", "generation": 2, "world_size": 4},
        phases(2),
    )
    assert main(["report", "--json", folder]) == 0
    generations = checked("report", capsys.readouterr().out)["generations"]
    assert [each["why"] for each in generations] == ["", shown]


GENERATION = {"restart_count": 0, "group_rank": 0, "group_world_size": 1, "rank_base": 0, "master": "h:1"}


def generation(number: int, size: int, *local_ranks: int) -> dict[str, Any]:
    more = {"local_ranks": list(local_ranks), "folders": []} if local_ranks else {}
    return {"event": "generation", "generation": number, "world_size": size, "nproc": size, **GENERATION, **more}


def went_on(number: int, local_rank: int, steps_lost: int) -> dict[str, Any]:
    return {"event": "went_on", "generation": number, "local_rank": local_rank, "steps_lost": steps_lost}


def regroup(number: int, size: int, text: str) -> list[dict[str, Any]]:
    return [
        {"event": "coordinator.regroup_begun", "generation": number, "world_size": size, "text": text},
        {"event": "regroup", "generation": number},
    ]


def test_workers_that_went_on_are_told_with_their_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One second lies between two events."""
    folder = journal(
        tmp_path / "one",
        begins("a"),
        generation(1, 3),
        phases(1, until_monotonic=1.0),
        {"event": "worker_ended", "generation": 1, "exit_code": -9, "stopped": False},
        *regroup(2, 2, "rank 1 on a was lost (killed by SIGKILL); 2 ranks go on"),
        generation(2, 2, 0, 2),
        went_on(2, 0, 0),
        went_on(2, 2, 4),
        *regroup(3, 3, "rank 1 was replaced; 3 ranks go on"),
        generation(3, 3, 0, 1, 2),
        went_on(3, 1, 0),
    )
    assert main(["report", folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "rank 1 on a was lost (killed by SIGKILL): 2 ranks went on after 5.00 s; 4 steps lost; replaced after 9.0 s"
        in lines
    )
    assert lines[-1].endswith("rank 1 was replaced")
    assert main(["report", "--json", folder]) == 0
    (survival,) = checked("report", capsys.readouterr().out)["history"]["survivals"]
    assert survival == {"generation": 2, "ranks": 2, "went_on_s": 5.0, "steps_lost": 4, "replaced_s": 9.0}


def test_a_loss_that_ends_the_run_is_no_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = journal(
        tmp_path / "one",
        begins("a"),
        {"event": "coordinator.assigned", "generation": 1, "world_size": 4},
        phases(1),
        {"event": "coordinator.lost", "member": "c#1", "reason": "silent for more than 6 s", "silent_s": 6.25},
        {"event": "coordinator.stopping", "generation": 1, "reason": "member_lost", "text": "c was lost"},
        {"event": "ended", "kind": "failed", "exit_code": 1},
    )
    assert main(["report", folder]) == 0
    assert "1 generation," in capsys.readouterr().out


def test_json_tells_the_same(two_nodes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--json", *two_nodes]) == 0
    told = checked("report", capsys.readouterr().out)
    assert (told["run_id"], told["nodes"], told["standbys"]) == ("job", ["a", "b"], 2)
    assert [each["total_s"] for each in told["generations"]] == [3.58, 9.43]
    assert told["generations"][1]["phases_s"]["detect"] == 6.25


def test_the_newest_run_when_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["report"]) == 2
    assert "no run in" in capsys.readouterr().err
    runs = tmp_path / "holdfast" / "runs"
    runs.mkdir(parents=True)
    for age_s, (name, run_id) in enumerate([("x_2", "new"), ("x_1", "old"), ("renamed", "oldest")]):
        journal(runs / name, begins("a", run_id))
        os.utime(runs / name / "events.jsonl", (1e9 - age_s, 1e9 - age_s))
    assert main(["report"]) == 0
    assert capsys.readouterr().out == "run new on a: 0 generations, not ended\n"


def test_a_run_whose_agent_was_killed_has_ended_without_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "a.example.org")
    killed = journal(tmp_path / "killed", begins("a"))
    assert main(["report", killed]) == 0
    without = "without a verdict: its agent was killed, or its disk was full"
    assert capsys.readouterr().out == f"run job on a: 0 generations, ended: {without}\n"
    assert main(["report", "--json", killed]) == 0
    assert checked("report", capsys.readouterr().out)["end"] == without
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.bind(f"{killed}/control.sock")
        control.listen()
        assert main(["report", killed]) == 0
    assert capsys.readouterr().out.endswith(", not ended\n"), "its agent answers"
    (tmp_path / "killed" / "verdict.json").write_text('{"kind": "failed", "exit_code": 3}')
    assert main(["report", killed]) == 0
    assert "0 generations, ended: failed, exit code 3\n" in capsys.readouterr().out
    elsewhere = journal(tmp_path / "elsewhere", begins("b"))
    assert main(["report", elsewhere]) == 0
    assert capsys.readouterr().out.endswith(", not ended\n"), "nothing here shows whether the agent on b lives"


def test_a_run_folder_that_may_not_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one of root's, after `sudo -E holdfast run`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runs = tmp_path / "holdfast" / "runs"
    runs.mkdir(parents=True)
    for name in ("roots_1", "mine_1"):
        journal(runs / name, begins("a", name))
    stat = Path.stat

    def denied(path: Path, **options: Any) -> os.stat_result:
        if "roots_1" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", denied)
    assert main(["report"]) == 0
    assert capsys.readouterr().out.startswith("run mine_1 on a:")


def test_a_run_without_a_name_has_the_one_of_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = journal(tmp_path / "mine", begins("a", "1b4e28ba-2fa1-41d2-883f-0016d3cca427"))
    assert main(["report", mine]) == 0
    assert capsys.readouterr().out.startswith("run snug-birch on a:")


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = journal(tmp_path / "mine", begins("a", "mine")), journal(tmp_path / "other", begins("a", "other"))
    odd = journal(tmp_path / "odd", torn='[]\n{"time": 1.0}\n')
    for line, told in [
        ([str(tmp_path)], "is no run folder"),
        ([mine, other], "different runs: mine and other"),
        ([odd], "contains no events of holdfast"),
        (["--nonsense"], "HF101"),
    ]:
        assert main(["report", *line]) == 2
        assert told in capsys.readouterr().err


def test_a_reader_that_has_gone_is_no_fault(two_nodes: list[str]) -> None:
    theirs, ours = os.pipe()
    os.close(theirs)
    line = [sys.executable, "-m", "holdfast", "report", *two_nodes]
    done = subprocess.run(line, stdout=ours, stderr=subprocess.PIPE, timeout=limit_s(30))
    os.close(ours)
    assert (done.returncode, done.stderr) == (141, b"")


def test_what_is_torn_or_of_another_version_is_left_out(
    two_nodes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk tears a line in the middle of a journal; a machine that lost power leaves zeros."""
    file = Path(two_nodes[0]) / "events.jsonl"
    torn = b'{"time": 1.0, "event": "ste{"time": 2.0, "event": "later"}\n' + bytes(40) + b"\n"
    strange = b'{"time": 3.0, "monotonic": 1.0, "event": "ended", "kind": 7}\n[1]\n'
    file.write_bytes(torn + file.read_bytes() + strange)
    page = tmp_path / "page.html"
    assert main(["report", "--html", str(page), *two_nodes]) == 0
    assert f"{file}: 4 lines are torn or of another version" in capsys.readouterr().err
    assert "succeeded, exit code 0" in page.read_text()


def test_no_field_that_is_missing_ends_a_report(
    two_nodes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Journals of another version have less, or more."""
    file = Path(two_nodes[0]) / "events.jsonl"
    whole = [json.loads(line) for line in file.read_text().splitlines()]
    known = [{"time": 1005.0, "monotonic": 1.0, "event": name, "generation": 1} for name in events()]
    less = [
        {key: value for key, value in event.items() if key != name}
        for event in [*whole, *known]
        for name in event.keys() - {"time", "event"}
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in [*whole, *less]))
    assert main(["report", "--json", "--html", "-", two_nodes[0]]) == 0
    assert capsys.readouterr().err == ""


def test_the_verdict_of_a_run_that_failed_is_shown_again(
    two_nodes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = {"code": "HF217", "cause": "rank 1 on b does not find a file", "advice": "copy it there"}
    outcome = {"kind": "failed", "exit_code": 3, "code": "HF217", "verdict": verdict}
    (tmp_path / "one" / "verdict.json").write_text(json.dumps(outcome))
    assert main(["report", *two_nodes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "holdfast: HF217: job FAILED after 0 restarts: rank 1 on b does not find a file" in lines
    assert lines[-3:] == [
        "  do           copy it there",
        f"  run folder   {tmp_path / 'one'}",
        "  exit code    3",
    ]
    (tmp_path / "one" / "verdict.json").write_text('{"verdict": null}')
    assert main(["report", *two_nodes]) == 0
    assert "HF217" not in capsys.readouterr().out


def test_what_different_nodes_waited_for_is_not_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One imports slowly, and the other one waits for it in the store."""
    one = journal(tmp_path / "one", begins("a"), phases(1, import_s=10.0, store_s=0.0))
    two = journal(tmp_path / "two", begins("b"), phases(1, import_s=1.0, store_s=9.0))
    assert main(["report", "--json", one, two]) == 0
    (generation,) = checked("report", capsys.readouterr().out)["generations"]
    assert generation["total_s"] == pytest.approx(10.56)


@pytest.mark.parametrize(
    ("kind", "exit_code", "why"),
    [
        ("signalled", 130, "ended by SIGINT"),
        ("signalled", 143, "ended by holdfast stop on a"),
        ("preempted", 75, "preempted by SIGUSR1: its workers stopped at a safe point"),
    ],
)
def test_a_wished_end_is_told_as_what_it_was(
    kind: str, exit_code: int, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = journal(
        tmp_path / "one",
        begins("a"),
        {"event": "coordinator.assigned", "generation": 1, "world_size": 4},
        phases(1),
        {"event": "coordinator.quit", "drain": True, "by": "holdfast stop on a"},
        {"event": "coordinator.verdict", "generation": 1, "cause": "no worker failed", "code": "HF200", "advice": ""},
        {"event": "ended", "kind": kind, "exit_code": exit_code, "text": why},
    )
    assert main(["report", "--html", "-", one]) == 0
    story = saved_in(capsys.readouterr().out)["story"]
    assert [each["what"] for each in story["incidents"]] == ["stop"]
    assert story["incidents"][0]["text"] == "asked for by holdfast stop on a"
    assert main(["report", one]) == 0
    assert f"ended: {kind}, exit code {exit_code} ({why})\n" in capsys.readouterr().out


def test_what_workers_end_with_when_they_were_asked_to_save_is_no_failure() -> None:
    verdict = {"event": "coordinator.verdict", "cause": "exit code 1", "code": "HF205", "advice": ""}
    asked = {"event": "worker_failed", "generation": 1, "rank": 3, "exit_code": 75, "message": "", "after_stop": False}
    drained = {"event": "coordinator.drain_to", "generation": 1, "safe_point": 7}
    found = incidents([[asked, drained, {**verdict, "generation": 1}, {**verdict, "generation": 2}]])
    assert [(each.what, each.generation) for each in found] == [("stop", 1), ("failure", 2)]


@pytest.mark.parametrize("asked_to", [{"save": True}, {}])
def test_a_crash_after_a_save_or_during_a_drain_is_a_failure(asked_to: dict[str, bool]) -> None:
    asked = {"event": "coordinator.drain_to", "generation": 1, "safe_point": 7, **asked_to}
    crash = {"event": "coordinator.verdict", "generation": 1, "cause": "was killed", "code": "HF204", "advice": ""}
    assert [each.what for each in incidents([[asked, crash]])] == ["failure"]


def test_faults_of_devices_are_shown_and_what_is_no_fault_is_not() -> None:
    node = {"member": "b#1", "generation": 2}
    xid = {"event": "coordinator.device", **node, "device": "GPU 3", "text": "XID 79 (the GPU has fallen off the bus)"}
    less = {
        "event": "coordinator.node_differs",
        **node,
        "trait": "gpus",
        "text": "has 7 GPUs, 3 of 4 nodes have 8 GPUs",
    }
    memory = {"event": "gpu_memory", "generation": 2, "seconds": 10.0, "left_bytes": {"GPU 1": 3 << 30}}
    found = incidents([[{**xid, "severe": True}, {**less, "slows": True}, memory]])
    assert [(each.what, each.generation) for each in found] == [("device", 2), ("node differs", 2), ("GPU memory", 2)]
    assert found[0].text == "XID 79 (the GPU has fallen off the bus) on GPU 3 of node b"
    assert "3072 MiB on GPU 1" in found[2].text
    assert not incidents([[{**xid, "severe": False}, {**less, "slows": False}, {**memory, "left_bytes": {}}]])


def test_an_exit_code_after_a_save_is_a_failure() -> None:
    saved = {"event": "coordinator.drain_to", "generation": 1, "safe_point": 7, "save": True}
    ended = {"event": "coordinator.verdict", "generation": 1, "cause": "exit code 3", "code": "HF205", "advice": ""}
    assert [each.code for each in incidents([[saved, ended]])] == ["HF205"]


# --- copies of states in memory on other nodes ------------------------------------------------------------------------


def world(generation: int) -> dict[str, Any]:
    return {"event": "generation", "generation": generation, "world_size": 2}


def copy(step: int, rank: int, kept: int = -1, why: str = "") -> dict[str, Any]:
    about = {"step": step, "rank": rank, "kept": kept, "to": "10.0.0.2", "why": why}
    return {"event": "snapshot_copy", **about, "size_bytes": 0 if why else 2**20, "took_s": 0.1}


FETCHED = {"event": "snapshot_fetched", "step": 8, "rank": 1, "of": "10.0.0.1", "took_s": 1.25}


@pytest.mark.parametrize(
    ("one", "two", "step", "skipped"),
    [
        ([world(1), copy(4, 0), copy(8, 0), copy(12, -1, why="late")], [world(1), copy(4, 1), copy(8, 1)], 8, 1),
        ([world(1), copy(4, 0), copy(8, 0)], [world(1), copy(4, 1), copy(8, 1, why="cut")], 4, 0),
        ([world(1), copy(4, 0), copy(8, 0, kept=4)], [], 4, 0),  # the other node's journal is not here
        ([world(1), copy(4, 0)], [], None, 0),
        ([world(1), copy(4, 0), world(2), copy(8, 0, kept=4)], [world(1), copy(4, 1)], None, 0),  # that node was lost
        ([world(1), copy(4, 0, why="cut"), copy(8, -1, why="late")], [], None, 1),
    ],
)
def test_which_step_would_survive_the_loss_of_a_node(
    tmp_path: Path, one: list[Any], two: list[Any], step: int | None, skipped: int
) -> None:
    folders = [journal(tmp_path / "one", begins("a"), *one), journal(tmp_path / "two", begins("b"), *two)]
    found = copies_of([list(read_journal(Path(each), print, ("generation", "snapshot_copy"))) for each in folders])
    assert found is not None
    assert (found["survivable_step"], found["skipped_since"]) == (step, skipped)
    assert ("from the disk" if step is None else f"from step {step}") in safe_text(found)


def test_a_report_says_what_was_resumed_from_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], two_nodes: list[str]
) -> None:
    lost = {"event": "coordinator.stopping", "generation": 1, "reason": "member_lost", "text": "b was lost"}
    again = {"event": "coordinator.assigned", "generation": 2, "world_size": 2}
    one = journal(tmp_path / "a", begins("a"), world(1), copy(8, 0), copy(8, 1), lost, again, world(2), FETCHED)
    assert main(["report", one]) == 0
    told = capsys.readouterr().out
    assert "b was lost: resumed from copies on other nodes at step 8; 1 state fetched, the slowest in 1.25 s" in told
    assert "copies on other nodes: 2 states sent (2 MiB), the newest of step 8" in told
    assert main(["report", *two_nodes]) == 0
    assert "copies" not in capsys.readouterr().out


# --- what a code means ------------------------------------------------------------------------------------------------


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["explain", *arguments])
    told = capsys.readouterr()
    return status, told.out, told.err


@pytest.mark.parametrize("spelt", ["HF211", "hf211", "211", "HF211:"])
def test_a_code_is_found_however_it_is_spelt(spelt: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = explain(capsys, spelt)
    assert status == 0
    assert out.startswith("HF211: a module is missing\n")
    assert [word for word in ("  cause ", "  evidence ", "  fix ") if word not in out] == []
    assert max(map(len, out.splitlines())) <= 100


def test_several_codes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = explain(capsys, "HF306", "HF109")
    assert re.findall(r"^HF\d+", out, re.MULTILINE) == ["HF306", "HF109"]
    assert "exit code   2" in out


def test_all_codes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = explain(capsys)
    assert status == 0
    listed = re.findall(r"^  (HF\d{3})  \S", out, re.MULTILINE)
    assert listed == sorted(explanations())
    assert [f"{start}xx  {heading}" for start, heading in headings().items()] == re.findall(r"^HF.*", out, re.MULTILINE)


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = explain(capsys, "--json", "HF216")
    (told,) = checked("explain", out)["codes"]
    assert (told["code"], told["name"]) == ("HF216", verdict_texts()["HF216"].name)
    assert "shm-size" in told["fix"]
    assert len(checked("explain", explain(capsys, "--json")[1])["codes"]) == len(explanations())


def test_an_unknown_code_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = explain(capsys, "HF298")
    assert status == 2
    assert out == ""
    assert re.fullmatch(r"holdfast: HF101: no code 'HF298'; did you mean HF2\d\d \(.*\n", err)


def test_a_word_finds_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "HF208" in nearest_codes("nccl")
    status, _, err = explain(capsys, "xyzzy")
    assert (status, len(err.splitlines())) == (2, 1)


def test_a_bad_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("explain", ["--jsn"]) == 2
    assert "holdfast: HF101:" in capsys.readouterr().err


def test_every_code_in_the_source_is_explained() -> None:
    codes = {code for file in SOURCE.rglob("*.py") for code in re.findall(r"\bHF\d{3}\b", file.read_text())}
    assert codes - set(explanations()) == set()


def test_every_rule_and_advice_has_a_text() -> None:
    assert {rule.code for rule in rules()} | set(advice()) <= set(verdict_texts())


def test_texts_are_complete_and_differ() -> None:
    for code, each in explanations().items():
        assert normal_code(code) == code
        assert all((each.name, each.cause, each.evidence, each.fix)), code
        assert "\n" not in each.name + each.cause + each.evidence + each.fix
    names = [text.name for text in verdict_texts().values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["exit code 137"], "HF203"),
        (["exit", "code", "137"], "HF203"),
        (["exit code 143"], "HF235"),
        (["signal 9"], "HF203"),
        (["out of memory"], "HF203"),
    ],
)
def test_words_are_searched_for(capsys: pytest.CaptureFixture[str], words: list[str], first: str) -> None:
    assert run_command("explain", words) == 0
    assert first in capsys.readouterr().out.splitlines()[0] or first in [each.code for each in search(" ".join(words))]


# --- mistakes in a command line: each has an example, and the examples are true ----------------------------------------


@pytest.mark.parametrize("code", [code for code in explanations() if code.startswith("HF1")])
def test_a_mistake_has_a_wrong_and_a_right_example(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = explain(capsys, code)
    rows = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "]
    assert rows[3:5] == ["wrong", "right"]


@pytest.mark.parametrize("code", ["HF101", "HF102", "HF103", "HF105", "HF106", "HF113"])
def test_the_examples_are_what_they_are_called(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    about = explanations()[code]
    meeting = "--rdzv-backend c10d --rdzv-endpoint node0:29400"

    def planned(example: str) -> int:
        line = (
            example if example.startswith("holdfast run") else f"holdfast run --nnodes 2 {meeting} {example} train.py"
        )
        return main(["run", "--plan", *line.replace("…", meeting).split()[2:]])

    assert planned(about.wrong) == 2
    assert capsys.readouterr().err.startswith(f"holdfast: {code}: ")
    assert planned(about.right) == 0


def progress(time_s: float, steps: int) -> dict[str, Any]:
    none = [-1, -1]
    about = {"stages": ["starting"] * 2, "ages_s": [0, 0], "own_s": [0, 0], "began_at": none, "at": none}
    return {
        "event": "progress",
        "time": time_s,
        "monotonic": time_s,
        "generation": 1,
        "rank_base": 0,
        **about,
        "steps": [steps] * 2,
    }


def test_what_comes_before_the_first_step_is_no_training() -> None:
    """Progress is written from the start on, also by workers that crash before they train."""
    begins = {"event": "begins", "time": 0.0, "monotonic": 0.0, "member": "a#1", "run_id": "r"}
    generation = {
        "event": "generation",
        "time": 1.0,
        "monotonic": 1.0,
        "generation": 1,
        "nproc": 2,
        "world_size": 2,
        "rank_base": 0,
        "restart_count": 0,
    }
    ended = [{"event": "worker_ended", "time": 60.0, "generation": 1, "exit_code": 1, "stopped": False}] * 2
    end = {"event": "ended", "time": 61.0, "kind": "failed", "exit_code": 1, "text": ""}
    found = history([[begins, generation, progress(2.0, 0), progress(52.0, 0), *ended, progress(60.3, 0), end]])
    assert "training" not in {each.doing.value for each in found.stretches}
    found = history([[begins, generation, progress(2.0, 0), progress(52.0, 7), *ended, end]])
    assert "training" in {each.doing.value for each in found.stretches}


def test_the_silence_of_a_spare_is_not_that_of_a_later_loss() -> None:
    events = [
        {"event": "begins", "time": 0.0, "monotonic": 0.0, "member": "a#1", "run_id": "r"},
        {"event": "coordinator.assigned", "time": 1.0, "generation": 1, "world_size": 4, "order": ["a"]},
        {"event": "coordinator.lost", "time": 50.0, "member": "spare#1", "reason": "silent", "silent_s": 10.0},
        {
            "event": "coordinator.regroup_begun",
            "time": 900.0,
            "generation": 2,
            "world_size": 3,
            "text": "rank 3 on a was lost",
            "order": ["a"],
        },
    ]
    assert "detect" not in timeline([events]).generations[-1].phases_s

"""status, stacks, stop and logs against agents that are only a socket with an answer: which run, what is said, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.cli import logs, main
from holdfast.cli.doctor import markdown, masked, variables
from holdfast.extensions.load.messages import NodeLoad
from holdfast.extensions.status import command as status
from holdfast.inherited import secret_variables
from holdfast.protocol.errors import UsageError
from holdfast.protocol.outcome import Failure, Outcome, OutcomeKind, Verdict
from holdfast.protocol.ranks_text import ranks_of
from holdfast.runs import log_files
from holdfast.runtime import running
from holdfast.runtime.agent_service import write_reports
from holdfast.runtime.running import RunningAgent
from holdfast.text import without_passwords
from tests.support.documents import checked

VIEW = {
    "run_id": "bert",
    "phase": "running",
    "generation": 2,
    "restarts": 1,
    "restarts_max": 3,
    "world_size": 0,
    "since_s": 3.0,
    "job_s": 10.0,
    "training_s": 5.0,
}
END = {"kind": "preempted", "exit_code": 75, "message": "preempted by holdfast stop on a", "cause": ""}


class PretendAgent:
    """Listens on a control socket and answers every question with what it was given."""

    def __init__(self, folder: Path, answers: dict[str, bytes | None]) -> None:
        folder.mkdir(parents=True)
        (folder / "events.jsonl").write_text(json.dumps({"event": "begins", "run_id": "bert"}) + "\n")
        self.asked: list[Any] = []
        self._answers = answers
        self._listening = socket.socket(socket.AF_UNIX)
        with running.reachable(str(folder / "control.sock")) as path:
            self._listening.bind(path)
        self._listening.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                line = client.makefile("rb").readline()
                if line:
                    ask = json.loads(line)["ask"]
                    self.asked.append(ask)
                    answer = self._answers.get(ask or "end")
                    if answer is not None:
                        client.sendall(answer)


def reply(body: object, **more: object) -> bytes:
    return json.dumps({"body": body, **more}).encode() + b"\n"


Pretend = Callable[..., PretendAgent]


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    """`pretend("name", status=b"…")`: an agent in the list."""
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "running"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    agents: list[PretendAgent] = []
    written: list[running.WrittenEntry] = []

    def make(name: str, run_id: str = "bert", endpoint: str = "a:1", **answers: bytes | None) -> PretendAgent:
        folder = tmp_path / "runs" / name
        agents.append(PretendAgent(folder, answers))
        made = RunningAgent(
            run_id=run_id,
            endpoint=endpoint,
            host="a",
            pid=os.getpid(),
            folder=str(folder),
            socket=str(folder / "control.sock"),
            began_epoch_s=float(len(agents)),
            script="train.py",
        )
        written.append(running.write(made, running.private_folder()))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()
    for each in written:
        running.remove(each)


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int) -> str:
    assert main(list(argv)) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def test_status_says_which_step_survives_the_loss_of_a_node(pretend: Pretend, tmp_path: Path, capsys) -> None:
    pretend("bert_one", status=reply(VIEW))
    assert "if a node is lost" not in said(capsys, "status", code=0)
    events = [{"event": "generation", "generation": 2, "world_size": 2}]
    events += [
        {"event": "snapshot_copy", "step": step, "rank": rank, "kept": -1, "why": "", "size_bytes": 9, "took_s": 0.1}
        for step, rank in ((4, 0), (4, 1), (8, 0))
    ]
    lines = [json.dumps({"time": 1.0, "monotonic": 1.0, **each}) + "\n" for each in events]
    (tmp_path / "runs" / "bert_one" / "events.jsonl").write_text("".join(lines))
    told = said(capsys, "status", code=0)
    assert told.endswith("\n\nif a node is lost now, training goes on from step 4\n")
    assert checked("status", said(capsys, "status", "--json", code=0))["copies"]["survivable_step"] == 4


# --- which run --------------------------------------------------------------------------------------------------------


def test_a_run_by_id_by_its_beginning_and_by_folder(pretend: Pretend, tmp_path: Path, capsys) -> None:
    pretend("bert_one", status=reply(VIEW))
    pretend("gpt_two", run_id="gpt", endpoint="b:1", status=reply({**VIEW, "run_id": "gpt"}))
    for name in ("bert", "be", "bert_one", str(tmp_path / "runs" / "bert_one")):
        assert said(capsys, "status", name, code=0).startswith("run bert: running for 3.0 s, generation 2")
    text = said(capsys, "stop", code=2)
    assert "HF127: 2 jobs run on this host; name one of them (the beginning is enough)" in text
    assert "bert_one" in text
    assert "gpt_two" in text


def test_a_run_id_may_hold_a_slash(pretend: Pretend, tmp_path: Path, capsys) -> None:
    pretend("team_run2_one", run_id="team/run2", status=reply({**VIEW, "run_id": "team/run2"}))
    ended = tmp_path / "state" / "holdfast" / "runs" / "team_run1_12345678"
    ended.mkdir(parents=True)
    (ended / "events.jsonl").write_text(json.dumps({"event": "begins", "run_id": "team/run1"}) + "\n")
    assert said(capsys, "status", "team/run2", code=0).startswith("run team/run2: running")
    assert f"{ended} has ended" in said(capsys, "stop", "team/run1", code=2)
    assert "team/run3 is no run folder" in said(capsys, "status", "team/run3", code=2)


def test_status_of_several_jobs_is_a_table(pretend: Pretend, capsys) -> None:
    pretend("bert_one", status=reply(VIEW))
    pretend("bert_one_again", status=reply(VIEW))
    pretend("gpt_two", run_id="gpt", endpoint="b:1", status=None)
    head, first, second, *_ = said(capsys, "status", code=0).splitlines()
    assert head.split() == ["RUN", "FOR", "PID", "RANKS", "SCRIPT", "STATE"]
    assert first.split()[0].startswith("bert_one")
    assert str(os.getpid()) in first
    assert "train.py" in first
    assert "running, effective training time 50% of 10 s" in first
    assert second.split()[0] == "gpt_two", "one that does not answer is listed too"
    jobs = checked("status", said(capsys, "status", "--json", code=0))["jobs"]
    assert [job["job"]["phase"] for job in jobs[:1]] == ["running"]
    assert jobs[1]["why"]
    assert "name one of them" in said(capsys, "status", "--watch", code=2)


def test_figures_of_extensions_are_in_the_json_among_the_others(pretend: Pretend, capsys) -> None:
    load = json.loads(msgspec.json.encode(NodeLoad(8, 50, 1, 2, 3, 4, 5, 6)))
    rank = {
        "rank": 0,
        "local_rank": 0,
        "stage": "stepping",
        "steps": 1,
        "step_s": 0.1,
        "own_s": 0.1,
        "age_s": 0.1,
        "pid": 7,
    }
    node = {"member": "a#1", "host": "a", "group_rank": 0, "state": "running", "heard_s": 0.1, "ranks": [rank]}
    pretend("bert_one", status=reply({**VIEW, "world_size": 1, "nodes": [{**node, "more": {"load": load}}]}))
    (told,) = checked("status", said(capsys, "status", "--json", code=0))["nodes"]
    assert (told["load"], "more" in told) == (load, False)
    assert told["ranks"][0]["pid"] == 7


@pytest.mark.parametrize(
    "line", ["status nobody", "stacks nobody", "status --nonsense", "report nowhere", "logs nobody"]
)
def test_an_error_with_json_is_json(line: str, pretend: Pretend, capsys) -> None:
    assert main([*line.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    error = checked(line.split(maxsplit=1)[0], out)["error"]
    assert err == f"holdfast: {error['code']}: {error['message']}\n"
    assert error["exit_code"] == 2


def test_one_run_id_twice(pretend: Pretend, capsys) -> None:
    pretend("none_one", run_id="none", endpoint="a:1", status=reply({**VIEW, "run_id": "first"}))
    pretend("none_two", run_id="none", endpoint="b:1", status=reply({**VIEW, "run_id": "second"}))
    assert "'none' means 2 jobs on this host" in said(capsys, "status", "none", code=2)
    assert "run second" in said(capsys, "status", "none_two", code=0)


@pytest.mark.usefixtures("pretend")
def test_an_entry_that_cannot_be_read_is_named_and_kept(capsys) -> None:
    """Its job may run: another version of holdfast wrote it."""
    file = Path(running.private_folder()) / "7-1.json"
    file.write_text('{"run_id": "later", "shards": []}')
    for line in (("status",), ("stop", "bert")):
        assert f"cannot read {file}: of a job of another version" in said(capsys, *line, code=2)
    assert file.exists()


def test_two_agents_of_one_job_are_no_choice(pretend: Pretend, capsys) -> None:
    pretend("bert_one", status=reply(VIEW))
    pretend("bert_two", status=reply(VIEW))
    assert "run bert" in said(capsys, "status", code=0)


def test_a_run_that_has_ended(pretend: Pretend, tmp_path: Path, capsys) -> None:
    runs = tmp_path / "state" / "holdfast" / "runs" / "old_12345678"
    runs.mkdir(parents=True)
    (runs / "events.jsonl").touch()
    (runs / "verdict.json").write_text('{"kind": "failed", "exit_code": 3}')
    for name in ("old", str(runs)):
        assert "has ended: failed, exit code 3" in said(capsys, "stop", name, code=2)
    assert "the newest run here" in said(capsys, "stop", code=2)
    (runs / "verdict.json").write_text("[")
    told = said(capsys, "status", str(runs), code=2)
    assert "has ended without a verdict: its agent was killed, or its disk was full" in told


def ended_run(tmp_path: Path, outcome: Outcome) -> Path:
    folder = tmp_path / "state" / "holdfast" / "runs" / "brave-otter_12345678"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text(json.dumps({"event": "begins", "run_id": "old"}) + "\n")
    write_reports(outcome, folder)
    return folder


def failed(folder: Path) -> Outcome:
    culprit = Failure(
        rank=1,
        local_rank=1,
        host="b",
        pid=7,
        exit_code=1,
        traceback="Traceback (most recent call last):\nValueError: bad batch",
        stderr_file=f"{folder}/1/stderr.log",
    )
    verdict = Verdict(code="HF201", cause="rank 1 on b raised ValueError: bad batch", culprit=culprit)
    return Outcome(kind=OutcomeKind.FAILED, exit_code=1, code="HF201", verdict=verdict)


def test_status_of_an_ended_run_is_its_last_screen(pretend: Pretend, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "state" / "holdfast" / "runs" / "brave-otter_12345678"
    ended_run(tmp_path, failed(folder))
    for line in (["status"], ["status", "brave"], ["status", "old"], ["status", str(folder)], ["status", "--watch"]):
        text = said(capsys, *line, code=0)
        assert text.startswith("run brave-otter_12345678 has ended: failed, exit code 1\n")
        assert "HF201: job FAILED after 0 restarts: rank 1 on b raised ValueError: bad batch" in text
        assert "rank 1 (local 1, pid 7) on b, exit code 1" in text
        assert "holdfast logs brave-otter --rank 1" in text
        assert text.endswith("ValueError: bad batch\n")
    told = checked("status", said(capsys, "status", "--json", code=0))
    assert (told["ended"], told["exit_code"], told["verdict"]["culprit"]["rank"]) == (True, 1, 1)


def test_status_of_a_run_that_was_stopped_says_so(pretend: Pretend, tmp_path: Path, capsys) -> None:
    ended_run(tmp_path, Outcome(kind=OutcomeKind.SIGNALLED, exit_code=143, message="ended by holdfast stop on a"))
    text = said(capsys, "status", code=0)
    assert text.startswith("run brave-otter_12345678 has ended: signalled, exit code 143 (ended by holdfast stop on a)")
    assert "holdfast logs brave-otter\n" in text


def test_a_run_that_goes_on_comes_before_one_that_has_ended(pretend: Pretend, tmp_path: Path, capsys) -> None:
    ended_run(tmp_path, Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0))
    pretend("bert_one", status=reply(VIEW))
    assert "run bert: running" in said(capsys, "status", code=0)
    assert "has ended: succeeded, exit code 0" in said(capsys, "status", "brave", code=0)


def test_an_agent_that_is_in_no_list_is_found_by_its_folder(pretend: Pretend, tmp_path: Path, capsys) -> None:
    pretend("bert_one", status=reply(VIEW))
    for path in (tmp_path / "running").iterdir():
        path.unlink()
    assert "HF127" in said(capsys, "status", "bert", code=2)
    assert "run bert" in said(capsys, "status", str(tmp_path / "runs" / "bert_one"), code=0)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (reply({"run_id": "bert"}), "HF128: the answer is of another version of holdfast"),
        (reply([]), "HF128: the answer is of another version of holdfast"),
        (b"SSH-2.0-nonsense\n", "HF128: the process at "),
        (b'{"body": ', "HF127: bert_one has just ended"),
        (None, "HF127: bert_one has just ended"),
        (reply(None, code="HF128", text="this job belongs to another user"), "HF128: the agent of bert_one (pid "),
    ],
)
def test_answers_that_are_none(pretend: Pretend, answer: bytes | None, told: str, capsys) -> None:
    pretend("bert_one", status=answer)
    text = said(capsys, "status", code=2)
    assert told in text
    assert text.count("\n") == 1


def test_the_next_agent_of_the_job_is_asked_when_one_has_just_ended(pretend: Pretend, capsys) -> None:
    pretend("bert_one", status=None)
    pretend("bert_two", status=reply(VIEW))
    assert "run bert" in said(capsys, "status", code=0)


def test_orders_about_hosts_and_saving_as_json(pretend: Pretend, capsys) -> None:
    answer = reply({"nodes": 1})
    pretend("bert_one", drain=answer, exclude=answer, readmit=answer, save=answer)
    sent = {"run": "bert_one", "nodes": 1}
    assert checked("save", said(capsys, "save", "--json", code=0)) == sent
    assert checked("drain", said(capsys, "drain", "b", "--json", code=0)) == {**sent, "host": "b"}
    assert checked("exclude", said(capsys, "exclude", "b", "--json", code=0)) == {**sent, "host": "b"}
    assert checked("readmit", said(capsys, "readmit", "b", "--json", code=0)) == {**sent, "host": "b"}


def test_json_says_whether_it_is_the_whole(pretend: Pretend, capsys) -> None:
    pretend("bert_one", status=reply(VIEW, whole=False))
    told = checked("status", said(capsys, "status", "--json", code=0))
    assert (told["whole"], told["run_id"], told["nodes"]) == (False, "bert", [])


def test_stop_waits_and_says_how_it_ended(pretend: Pretend, capsys) -> None:
    agent = pretend("bert_one", stop=reply({"nodes": 3}), end=reply(END))
    text = said(capsys, "stop", code=0)
    assert text.splitlines() == [
        "bert_one: stop sent to 3 nodes",
        "bert_one has ended: preempted, exit code 75 (preempted by holdfast stop on a)",
    ]
    assert set(agent.asked) == {"stop", None}
    assert checked("stop", said(capsys, "stop", "--json", code=0))["exit_code"] == 75


def test_stop_need_not_wait(pretend: Pretend, capsys) -> None:
    pretend("bert_one", stop=reply({"nodes": 3}))
    assert said(capsys, "stop", "--no-wait", code=0) == "bert_one: sent to 3 nodes\n"


def test_an_agent_that_dies_of_it_is_told_of(pretend: Pretend, capsys) -> None:
    pretend("bert_one", kill=reply({"nodes": 1}))
    assert "ended without a report" in said(capsys, "kill", code=1)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "stacks", "logs", "stop", "kill", "env"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([command, "--help"])
    assert raised.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["--watch", "0"], "must be 0.1 seconds or more"),
        (["--watch", "nan"], "must be 0.1 seconds or more"),
        (["bert", "--watch", "soon"], "must be a number of seconds"),
    ],
)
def test_watch_of_what_is_no_time(line: list[str], told: str) -> None:
    chosen = status.status_parser().parse_args(line)
    with pytest.raises(UsageError, match=told):
        status.watch_interval(chosen)


def test_watch_takes_the_run_for_what_it_is() -> None:
    chosen = status.status_parser().parse_args(["--watch", "bert"])
    assert status.watch_interval(chosen) == 2.0
    assert chosen.run == "bert"
    assert status.watch_interval(status.status_parser().parse_args(["bert", "--watch", "0.5"])) == 0.5
    assert status.watch_interval(status.status_parser().parse_args(["bert"])) is None


@pytest.mark.parametrize("text", ["x", "-1", "3-", "1,,2", "7-0", "3,2-1", "0-9999999", ""])
def test_ranks_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="write ranks like"):
        ranks_of([text])


# --- logs of a run that has ended -------------------------------------------------------------------------------------


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """Three generations of two ranks, the last two of one attempt."""
    folder = tmp_path / "bert_x"
    places = [("attempt_0", 1, 0, 4), ("attempt_1", 2, 1, 4), ("attempt_1_generation_3", 3, 1, 0)]
    folder.mkdir()
    with (folder / "events.jsonl").open("w") as journal:
        for name, generation, restart_count, rank_base in places:
            event = {"event": "generation", "generation": generation, "restart_count": restart_count}
            journal.write(json.dumps({**event, "rank_base": rank_base, "nproc": 2}) + "\n")
            for local_rank in range(2):
                worker = folder / name / str(local_rank)
                worker.mkdir(parents=True)
                (worker / "stdout.log").write_text(f"generation {generation}\nstep 1\rstep 2\nlast")
                (worker / "stderr.log").write_bytes(b"warning \xff\n")
    return folder


def test_logs_of_the_newest_generation(ended: Path, capsys) -> None:
    lines = said(capsys, "logs", str(ended), code=0).splitlines()
    assert lines[:4] == ["0| generation 3", "0| step 2", "0| last", "0| warning \N{REPLACEMENT CHARACTER}"]
    assert lines[4] == "1| generation 3"


def test_logs_of_one_rank_of_an_older_generation(ended: Path, capsys) -> None:
    line = ("logs", str(ended), "--rank", "5", "--generation", "2", "--stdout", "-n", "2")
    assert said(capsys, *line, code=0) == "step 2\nlast\n"


def test_logs_as_json_and_by_pattern(ended: Path, capsys) -> None:
    text = said(capsys, "logs", str(ended), "--grep", "^warn", "--rank", "1", "--json", code=0)
    (told,) = (checked("logs", each) for each in text.splitlines())
    assert told == {"rank": 1, "stream": "stderr", "generation": 3, "line": "warning \N{REPLACEMENT CHARACTER}"}


def test_follow_of_a_run_that_has_ended_ends(ended: Path, capsys) -> None:
    line = ("logs", str(ended), "-f", "--stdout", "--rank", "0")
    assert said(capsys, *line, code=0) == "generation 3\nstep 2\nlast\n"
    assert said(capsys, *line, "-n", "1", code=0) == "last\n"
    assert said(capsys, *line, "--grep", "step", code=0) == "step 2\n", "nor an unfinished line that does not match"


def test_logs_of_many_generations_are_followed_with_few_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 0
    opened: list[int] = []
    shown: list[str] = []

    def begin() -> None:
        nonlocal number
        number += 1
        for stream in ("stdout", "stderr"):
            file = tmp_path / f"attempt_{number - 1}" / "0" / f"{stream}.log"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{stream} {number}\nunfinished {number}")
        with (tmp_path / "events.jsonl").open("a") as journal:
            event = {
                "event": "generation",
                "generation": number,
                "restart_count": number - 1,
                "rank_base": 0,
                "nproc": 1,
            }
            journal.write(json.dumps(event) + "\n")

    def news(*_: object) -> bool:
        opened.append(len(os.listdir("/proc/self/fd")))
        begin()
        return number == 20

    monkeypatch.setattr(logs, "wait_for_news", news)
    monkeypatch.setattr(logs, "end_of", lambda *_: object())
    monkeypatch.setattr(logs, "outcome_of", lambda _: object())
    begin()
    wanted = logs.Wanted(set(), ("stdout", "stderr"), None, None)
    logs.follow([tmp_path], wanted, lambda line: shown.append(line.text), 10)
    assert len(set(opened)) == 1
    assert [shown.count(f"unfinished {each}") for each in range(1, 21)] == [2] * 20


def test_a_worker_that_goes_on_with_another_rank_is_followed_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal, which is large after a week, is read once."""
    parsed: list[str] = []
    shown: list[tuple[int, int, str]] = []
    file = tmp_path / "attempt_0" / "1" / "stdout.log"
    file.parent.mkdir(parents=True)
    turns = iter(((2, "two\n", False), (2, "three\n", True)))

    def begin(generation: int, text: str) -> None:
        with (tmp_path / "events.jsonl").open("a") as journal:
            event = {"event": "generation", "generation": generation, "restart_count": 0, "rank_base": 2 - generation}
            journal.write(json.dumps({**event, "nproc": 1, "folders": ["attempt_0/1"]}) + "\n")
        with file.open("a") as log:
            log.write(text)

    def news(*_: object) -> bool:
        generation, text, ended = next(turns)
        begin(generation, text)
        return ended

    def loads(line: bytes) -> Any:
        parsed.append(line.decode())
        return json.loads(line)

    monkeypatch.setattr(logs, "wait_for_news", news)
    monkeypatch.setattr(logs, "end_of", lambda *_: object())
    monkeypatch.setattr(logs, "outcome_of", lambda _: object())
    monkeypatch.setattr(log_files, "json", SimpleNamespace(loads=loads))
    begin(1, "one\n")
    wanted = logs.Wanted(set(), ("stdout",), None, None)
    logs.follow([tmp_path], wanted, lambda line: shown.append((line.file.rank, line.file.generation, line.text)), 10)
    assert shown == [(1, 1, "one"), (0, 2, "two"), (0, 2, "three")]
    assert len(parsed) == 3


def test_what_a_killed_agent_has_left_is_shown_too(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor moves it into the files, after the connection has ended."""
    shown: list[str] = []
    file = ended / "attempt_1_generation_3" / "0" / "stdout.log"
    monkeypatch.setattr(logs, "wait_for_news", lambda *_: True)
    monkeypatch.setattr(logs, "end_of", lambda *_: object())
    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=lambda _: file.write_text(f"{file.read_text()}\nrest\n")))
    logs.follow([ended], logs.Wanted({0}, ("stdout",), None, None), lambda line: shown.append(line.text), 10)
    assert shown[-2:] == ["last", "rest"]


def test_logs_in_which_nothing_stands_are_said(ended: Path, capsys) -> None:
    line = ("logs", str(ended), "--rank", "0", "--stderr")
    (ended / "attempt_1_generation_3" / "0" / "stderr.log").write_bytes(b"")
    assert main(list(line)) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"holdfast: {ended}: these workers wrote nothing\n")


def test_logs_that_are_not_there(ended: Path, tmp_path: Path, capsys) -> None:
    assert "no generation 9; the generations are 1, 2, 3" in said(
        capsys, "logs", str(ended), "--generation", "9", code=2
    )
    assert "the ranks here are 0, 1, 4, 5" in said(capsys, "logs", str(ended), "--rank", "7", code=2)
    assert "is no run folder" in said(capsys, "logs", str(tmp_path), code=2)
    assert "HF101" in said(capsys, "logs", str(ended), "-n", "-3", code=2)


# --- env --------------------------------------------------------------------------------------------------------------


def test_env_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "env", code=0)
    assert text.startswith("### Software\n| | |\n|---|---|\n| holdfast | ")
    for part in ("| Python |", "### Machine", "| kernel |", "| memory |", "### Network", "| open files |"):
        assert part in text
    told = checked("env", said(capsys, "env", "--json", code=0))
    assert set(told["sections"]) == {
        "Software",
        "Machine",
        "GPUs",
        "Network",
        "Limits (soft / hard)",
        "Variables",
        "Compiled kernels",
    }


def test_env_masks_what_is_secret() -> None:
    environ = {
        "HOLDFAST_TOKEN": "a-secret",
        "PET_RDZV_CONF": "timeout=3,token=b-secret, password = c-secret",
        "PET_RDZV_ENDPOINT": "http://me:d-secret@host:1",
        "NCCL_DEBUG": "INFO",
        "AWS_SECRET_ACCESS_KEY": "e-secret",
        "HOME": "/srv/somebody",
    }
    told = variables(environ)
    assert "secret" not in str(told).replace("SECRET", "")
    assert told["NCCL_DEBUG"] == "INFO"
    assert set(told) == {"HOLDFAST_TOKEN", "PET_RDZV_CONF", "PET_RDZV_ENDPOINT", "NCCL_DEBUG"}
    assert told["PET_RDZV_CONF"] == "timeout=3,token=***, password = ***"
    assert masked("NCCL_TOPO", "x" * 1000) == "x" * 399 + "…"


@pytest.mark.parametrize("conf", ["user=u,password=hush", "user = u, password = hush", "password =hush"])
def test_a_password_with_blanks_is_a_secret_too(conf: str) -> None:
    """As the rendezvous reads it: workers do not get it."""
    assert secret_variables({"PET_RDZV_CONF": conf}) == ["PET_RDZV_CONF"]
    assert "hush" not in without_passwords(conf)


def test_env_tables_hold_whatever_is_in_them() -> None:
    assert markdown({"A": {"x|y": "1\n2"}, "B": {}}) == "### A\n| | |\n|---|---|\n| x\\|y | 1 2 |"


def test_commands_load_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, holdfast.extensions.status.command, holdfast.cli.logs, holdfast.cli.doctor\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'rich', 'asyncio'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

"""`holdfast submit --slurm`: which words are whose, what the batch script does, what of a job is told."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import main, submit
from holdfast.cli.submit import Batch, Directive, batch_script
from holdfast.launchers.slurm import JobState, ScontrolOutput, read_job
from holdfast.protocol.errors import CallerError, ScriptError, SubmitError, UsageError
from holdfast.protocol.exit_codes import EXIT_CODES, Scheduler
from tests.support.limits import limit_s
from tests.support.tables import tables

TABLES = tables(__file__)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def read(line: str) -> submit.BatchRequest:
    found = submit.read(shlex.split(line))
    assert found is not None
    return found


@pytest.mark.parametrize(("line", "directives", "run"), TABLES["whose_words"])
def test_whose_words(line: str, directives: str, run: str) -> None:
    batch = read(line).batch
    assert " ".join(map(str, batch.directives)) == directives
    assert batch.command == (sys.executable, "-m", "holdfast", "run", "--slurm", *shlex.split(run))


@pytest.mark.parametrize(("line", "said"), TABLES["refused"])
def test_what_cannot_be_is_said(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(line)


@pytest.mark.parametrize(
    "line",
    [
        "--rdzv-conf user=u,password=hunter2 train.py",
        "'--rdzv-conf=user = u, password = hunter2' train.py",
        "--rdzv-endpoint http://u:hunter2@etcd train.py",
    ],
)
def test_a_password_is_in_no_script_that_others_can_read(line: str) -> None:
    with pytest.raises(SubmitError, match="would be readable in the job's script; use password_file=") as raised:
        read(line)
    assert "hunter2" not in str(raised.value)


def test_a_folder_that_python_runs_is_a_script(folder: Path) -> None:
    (folder / "package").mkdir()
    with pytest.raises(ScriptError, match=r"folder without a __main__\.py"):
        read("package")
    (folder / "package/__main__.py").touch()
    assert read("package").batch.command[-1] == "package"
    assert read("'s_$local_rank.py'").batch.command[-1] == "s_$local_rank.py"


def test_values_are_one_word_each_for_sbatch() -> None:
    """sbatch splits the lines of a batch script as a shell does."""
    text = batch_script(read("--comment 'two words' --wckey a#b -D '/my data' -o 'it'\\''s' absent.py").batch)
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    found = [shlex.split(line, comments=True) for line in lines]
    assert found[1:5] == [["--comment=two words"], ["--wckey=a#b"], ["--chdir=/my data"], ["--output=it's"]]
    assert all(len(words) == 1 for words in found)


@pytest.mark.parametrize("line", ["--help", "-h", "-N 4 --help", "-N 4 -h train.py"])
def test_help_wherever_it_is_asked_for(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--slurm", *line.split()]) == 0
    assert capsys.readouterr().out.startswith("usage: holdfast submit --slurm")


@pytest.mark.parametrize(("given", "kept"), [("", False), ("secret", True)])
def test_a_token_that_was_exported_is_the_jobs(given: str, kept: bool) -> None:
    """A witness of the job has the same."""
    lines = "\n".join([*submit.TOKEN_LINES, 'echo "$HOLDFAST_TOKEN"'])
    environ = {**os.environ, **({"HOLDFAST_TOKEN": given} if given else {})}
    done = subprocess.run(["bash", "-c", lines], env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout.strip() == given) is kept
    assert len(done.stdout.strip()) == (6 if kept else 64)


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(ScriptError, match=r"absent\.py"):
        read("absent.py")
    assert read("--chdir /data absent.py").batch.name == "absent"


def test_without_sbatch_one_message_and_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "--slurm", "-N2", "train.py"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "sbatch is not on the PATH" in error
    assert not Path("train.sbatch").exists()
    assert main(["submit", "--slurm", "-N2", "--dry-run", "train.py"]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out


def test_a_file_of_somebody_else_is_left_alone() -> None:
    path = Path("train.sbatch")
    path.write_text("#!/bin/bash\nmine\n")
    with pytest.raises(UsageError, match=r"train\.sbatch"):
        submit.write(path, "x")
    assert path.read_text().endswith("mine\n")


def program(path: Path, body: str) -> None:
    """A program in the folder's place of Slurm's own."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("code", "preempted", "requeued"),
    [*TABLES["requeues"], *((each.number, False, each.scheduler is Scheduler.AGAIN) for each in EXIT_CODES)],
)
def test_when_the_batch_script_requeues(folder: Path, code: int, preempted: bool, requeued: bool) -> None:
    """With a scontrol that only notes what it was asked."""
    time = "2030-01-01T00:00:00" if preempted else "None"
    program(folder / "scontrol", f'echo "$@" >> {folder}/asked\necho "JobId=7 PreemptTime={time} X=1"')
    batch = Batch((Directive("nodes", "2"),), ("sh", "-c", f"test ${{#HOLDFAST_TOKEN}} = 64 && exit {code}"), "x")
    (folder / "x.sbatch").write_text(batch_script(batch))
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash", "x.sbatch"], env=environ, timeout=limit_s(20)).returncode == code
    asked = (folder / "asked").read_text() if (folder / "asked").exists() else ""
    assert ("requeue 7" in asked) == requeued


def test_a_task_of_an_array_requeues_itself_alone() -> None:
    """The last task's SLURM_JOB_ID is the array's number, which means all tasks."""
    text = batch_script(Batch((Directive("array", "0-3"),), ("true",), "x"))
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' in text
    assert "$SLURM_JOB_ID" not in text


def test_no_requeue_is_obeyed() -> None:
    text = batch_script(Batch((Directive("no-requeue"),), ("true",), "x"))
    assert "scontrol" not in text
    assert "#SBATCH --requeue" not in text


RUNNING = "JobId=7 JobName=a b JobState=RUNNING Reason=None ExitCode=0:0 NodeList=n[1-2] StdOut=/a b/slurm-7.out Power="


def test_what_scontrol_says_of_a_job() -> None:
    state = read_job(ScontrolOutput(RUNNING))
    assert state == JobState("RUNNING", "None", "n[1-2]", "/a b/slurm-7.out", 1)
    assert not state.over
    failed = read_job(ScontrolOutput(RUNNING.replace("RUNNING", "FAILED").replace("0:0", "3:0")))
    assert failed is not None
    assert (failed.over, failed.status) == (True, 3)
    assert read_job(ScontrolOutput("Invalid job id", failed=True)) is None


def test_a_log_is_followed_to_the_jobs_end(
    folder: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "JOB_POLL_S", 0.0)
    monkeypatch.setattr(submit, "LOG_END_S", 0.0)
    log = folder / "log"
    states = iter(["PENDING", "RUNNING", None, "RUNNING", "PENDING", "RUNNING", "COMPLETED"])

    def ask() -> JobState | None:
        state = next(states)
        with log.open("ab") as file:
            file.write(f"{state}\n".encode())
        return None if state is None else JobState(state, "Priority", "n1", str(log), 0)

    assert submit.Follower("7", ask).run() == 0
    out, err = capfdbinary.readouterr()
    assert out.decode().split() == ["PENDING", "RUNNING", "None", "RUNNING", "PENDING", "RUNNING", "COMPLETED"]
    assert err.decode().count("waits (Priority)") == 2


def test_a_log_that_this_machine_may_not_read_is_reported_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").touch()
    follower = submit.Follower("7")
    follower.log = str(folder / "file" / "log")
    follower.copy()
    follower.copy()
    assert capsys.readouterr().err.count("log cannot be read here: Not a directory") == 1


def test_ctrl_c_leaves_the_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_self: submit.Follower) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit.Follower, "run", interrupted)
    assert submit.follow("7") == 130
    assert "scancel 7" in capsys.readouterr().err


def test_what_sbatch_refuses_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(folder / "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2\nexit 1")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with pytest.raises(CallerError, match="invalid partition"):
        submit.submit(Path("train.sbatch"))


# --- chains -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "cancelled"),
    [
        (0, True),
        (1, True),
        *((each.number, each.scheduler is not Scheduler.AGAIN) for each in EXIT_CODES),
        (143, False),
    ],
)
def test_which_end_of_a_job_ends_its_chain(folder: Path, code: int, cancelled: bool) -> None:
    """With a squeue that knows a job of this chain, one of another chain, and one with no comment."""
    batch = read("--chain 3 --time 60 train.py").batch._replace(command=("sh", "-c", f"exit {code}"))
    program(folder / "squeue", f"printf '8 {batch.chain}\\n9 {batch.chain}0\\n10 (null)\\n'")
    program(folder / "scancel", f'echo "$@" >> {folder}/asked')
    (folder / "x.sbatch").write_text(batch_script(batch))
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash", "x.sbatch"], env=environ, timeout=limit_s(20)).returncode == code
    asked = (folder / "asked").read_text() if (folder / "asked").exists() else ""
    assert asked == ("8\n" if cancelled else "")


def test_a_chain_is_submitted_in_order_and_none_of_its_jobs_is_requeued(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(folder / "sbatch", f'echo "$@" >> {folder}/asked\nwc -l < {folder}/asked')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert main(["submit", "--slurm", "--chain=3", "train.py"]) == 0
    asked = (folder / "asked").read_text().splitlines()
    assert [line.split()[1:-1] for line in asked] == [[], ["--dependency=afterany:1"], ["--dependency=afterany:2"]]
    text = Path("train.sbatch").read_text()
    assert "#SBATCH --no-requeue" in text
    assert "scontrol requeue" not in text
    assert "stop it with: scancel 1 2 3" in capsys.readouterr().err


def test_a_chain_that_is_refused_in_the_middle_names_its_first_jobs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(folder / "sbatch", f"echo >> {folder}/asked\n[ $(wc -l < {folder}/asked) -lt 3 ] && wc -l < {folder}/asked")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with pytest.raises(CallerError, match="the chain's first jobs are submitted: scancel 1 2"):
        submit.submit_chain(Path("train.sbatch"), 4)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--chain 0 train.py", "must be a number of jobs"),
        ("--chain x train.py", "must be a number of jobs"),
        ("--chain", "must be a number of jobs"),
        ("--chain 2 --array=0-3 train.py", "a chain of its own"),
        ("--chain 2 --comment mine train.py", "known by it"),
        ("--chain 2 --requeue train.py", "goes on instead"),
    ],
)
def test_what_cannot_be_a_chain_is_said(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(line)


# --- spares -----------------------------------------------------------------------------------------------------------


def test_spares_are_nodes_of_the_job_without_which_it_forms() -> None:
    batch = read("-N 4 --spares 2 --time 60 train.py --lr 1").batch
    assert " ".join(map(str, batch.directives)) == "--time=60 --nodes=6"
    assert shlex.join(batch.command).endswith("run --slurm --nnodes 4 train.py --lr 1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-N 4 --spares 0 train.py", "must be a number of nodes"),
        ("-N 4 --spares", "must be a number of nodes"),
        ("--spares 1 train.py", "without -N: give the number of nodes that train, at least 2"),
        ("-N 1 --spares 1 train.py", "-N 1: give the number of nodes that train, at least 2"),
        ("-N 2-4 --spares 1 train.py", "-N 2-4: give the number of nodes that train"),
        ("-N 4 --spares 1 --nnodes 3:4 train.py", "not with --nnodes"),
    ],
)
def test_spares_that_cannot_be_are_refused(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(line)

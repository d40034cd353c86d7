"""Programs that the agent runs beside the workers: how they end, and that nothing of them outlives the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from holdfast.supervisor import processes
from holdfast.supervisor.attached import attached, take
from tests.supervisor.test_supervisor import NUISANCE_PROCESSES, noted, nuisance
from tests.support.limits import until


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -KILL $$", -9), ("kill -USR1 $$", -10)])
def test_it_ends_as_the_program_has_ended(script: str, code: int) -> None:
    assert subprocess.run(attached(["sh", "-c", script]), check=False).returncode == code


def test_what_is_written_and_read_is_the_programs() -> None:
    line = attached(["sh", "-c", "cat; echo end >&2"])
    done = subprocess.run(line, input="in", capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("in", "end\n")


def test_it_waits_for_what_the_program_leaves_behind(tmp_path: Path) -> None:
    script = f"(until [ -e {tmp_path}/go ]; do sleep 0.01; done; touch {tmp_path}/done) & exit 4"
    with subprocess.Popen(attached(["sh", "-c", script])) as process:
        (tmp_path / "go").touch()
        assert process.wait() == 4
    assert (tmp_path / "done").exists()


def test_a_program_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        attached(["no-such-program"])


def test_an_interruption_is_passed_on(tmp_path: Path) -> None:
    script = f"trap 'exit 5' INT; touch {tmp_path}/up; while true; do sleep 0.01; done"
    with subprocess.Popen(attached(["sh", "-c", script])) as process:
        until((tmp_path / "up").exists, "the program runs")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 5


def test_an_interruption_after_the_end_of_the_program_changes_nothing(tmp_path: Path) -> None:
    """A process that it has left behind still runs, so the one between lives on."""
    script = f"trap '' INT; (until [ -e {tmp_path}/go ]; do sleep 0.01; done) & echo $$ > {tmp_path}/pid; exit 4"
    with subprocess.Popen(attached(["sh", "-c", script]), stderr=subprocess.PIPE, text=True) as process:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"), "the program runs")
        program = int((tmp_path / "pid").read_text())
        until(lambda: not Path(f"/proc/{program}").exists(), "it is reaped")
        process.send_signal(signal.SIGINT)
        until(lambda: not processes.signals(process.pid).pending(signal.SIGINT), "the signal has come")
        (tmp_path / "go").touch()
        _, errors = process.communicate()
    assert (process.returncode, errors) == (4, "")


def test_a_signal_that_comes_while_others_are_taken_is_taken_next() -> None:
    class Interrupted(list[int]):
        def pop(self, index: int = -1) -> int:  # type: ignore[override]
            taken = super().pop(index)
            if taken == signal.SIGCHLD:
                self.append(signal.SIGTERM)  # as a handler does
            return taken

    signals = Interrupted([signal.SIGCHLD])
    assert take(signals) == [signal.SIGCHLD]
    assert take(signals) == [signal.SIGTERM]


@pytest.mark.parametrize("killed", [False, True], ids=["SIGTERM to it", "SIGKILL to the agent"])
def test_all_its_processes_end(tmp_path: Path, killed: bool) -> None:
    """Those in sessions of their own, and those that are suspended, too."""
    pids = tmp_path / "pids"
    agent = f"""
        import subprocess, threading, time
        from holdfast.supervisor.attached import attached
        started = threading.Thread(target=lambda: print(subprocess.Popen(attached({nuisance(pids)!r})).pid, flush=True))
        started.start()
        started.join()  # the end of the thread that has started it ends nothing
        time.sleep(1000)
    """
    line = [sys.executable, "-c", textwrap.dedent(agent)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        between = int(process.stdout.readline())
        until(lambda: len(noted(pids)) == NUISANCE_PROCESSES, "all that the program starts")
        os.kill(process.pid if killed else between, signal.SIGKILL if killed else signal.SIGTERM)
        try:
            until(lambda: not [pid for pid in [between, *noted(pids)] if processes.is_alive(pid)], "the end of all")
        finally:
            process.kill()
            for pid in filter(processes.is_alive, noted(pids)):
                os.kill(pid, signal.SIGKILL)

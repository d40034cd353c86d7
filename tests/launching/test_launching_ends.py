"""How a launch is ended from outside: interrupts, time-outs, deaths, and jobs of two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.core import errors
from tests.conftest import LEAK_GRACE_S, alive
from tests.launching import launch_cases as cases
from tests.support.limits import limit_s, until

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0


def pids(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


@contextmanager
def when_working(folder: Path, workers: int, act: Callable[[], None]) -> Iterator[None]:
    """Within: as soon as so many workers have told of themselves, `act` is called, in a thread."""

    def wait() -> None:
        until(lambda: len(pids(folder)) == workers, "all workers")
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join(limit_s(PATIENCE_S))


def test_keyboard_interrupt_ends_the_job_before_it_goes_on(tmp_path: Path) -> None:
    with when_working(tmp_path, 2, lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        holdfast.launch(cases.sleep_and_tell, str(tmp_path), nproc=2)
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    """The grace of an hour that the first one has begun does not matter."""
    folder, asked = tmp_path / "workers", tmp_path / "asked"
    folder.mkdir()

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        until(asked.exists, "the worker was asked to stop", PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)

    def stubborn(workers: str, asked: str) -> None:
        cases.sleep_and_tell(workers, stubborn=asked)

    with when_working(folder, 1, twice), pytest.raises(KeyboardInterrupt):
        holdfast.launch(stubborn, str(folder), str(asked), shutdown_timeout=3600)
    assert not any(alive(pid) for pid in pids(folder))


def test_timeout(tmp_path: Path) -> None:
    with pytest.raises(holdfast.LaunchTimeoutError, match=r"did not end within 1\.5 s") as caught:
        holdfast.launch(cases.sleep_and_tell, str(tmp_path), nproc=2, timeout=1.5)
    assert isinstance(caught.value, TimeoutError)
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_nodes_that_do_not_come(free_port) -> None:
    with pytest.raises(errors.JoinTimeoutError):
        holdfast.launch(cases.echo, 1, nnodes=2, rdzv_endpoint=f"localhost:{free_port()}", start_timeout=1)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_agent_ended_by_somebody_else(tmp_path: Path, signum: signal.Signals) -> None:
    def end_agent() -> None:
        worker = pids(tmp_path)[0]
        keeper = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        agent = int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signum)

    with when_working(tmp_path, 1, end_agent), pytest.raises(errors.StoppedError, match=signum.name) as caught:
        holdfast.launch(cases.sleep_and_tell, str(tmp_path))
    assert caught.value.exit_code == 128 + signum
    until(lambda: not any(alive(pid) for pid in pids(tmp_path)), "no worker")


def test_nothing_is_left_when_the_caller_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, holdfast; from tests.launching.launch_cases import sleep_and_tell\n"
        "holdfast.launch(sleep_and_tell, sys.argv[1], nproc=2)"
    )
    caller = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    try:
        until(lambda: len(pids(tmp_path)) == 2, "both workers")
    finally:
        caller.kill()
        caller.wait()
    until(lambda: not any(alive(pid) for pid in pids(tmp_path)), "no worker", LEAK_GRACE_S)


# --- two nodes --------------------------------------------------------------------------------------------------------

NODE = """
import sys, holdfast
from tests.launching import launch_cases as cases
from tests.support.limits import limit_s
parameters = dict(nnodes=2, nproc=2, rdzv_endpoint=sys.argv[1], rdzv_id="two", token="secret")
parameters["start_timeout"] = int(limit_s(30))
try:
    print("got", holdfast.launch(eval(sys.argv[2]), **parameters))
except holdfast.WorkerFailedError as error:
    print("failed", error.rank, type(error.__cause__).__name__, "pineapple" in str(error.__cause__))
"""


def two_nodes(endpoint: str, function: str) -> list[str]:
    command = [sys.executable, "-c", NODE, endpoint, function]
    nodes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        texts = [node.communicate(timeout=limit_s(3 * PATIENCE_S))[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    return sorted(line for text in texts for line in text.splitlines() if line.startswith(("got", "failed")))


def test_two_nodes(free_port) -> None:
    """Each call returns the results of its own node's ranks."""
    lines = two_nodes(f"localhost:{free_port()}", "lambda: cases.rank() * 10")
    assert lines == ["got {0: 0, 1: 10}", "got {2: 20, 3: 30}"]


def test_failure_on_one_node_is_told_on_both(free_port) -> None:
    lines = two_nodes(f"localhost:{free_port()}", "lambda: cases.raise_custom(3)")
    assert lines == ["failed 3 CustomError True", "failed 3 RemoteTracebackError True"]

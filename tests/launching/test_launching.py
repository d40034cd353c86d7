"""holdfast.launch: results, failures and parameters, with real agents and workers."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.linux import process_stat
from holdfast.protocol import errors
from tests.conftest import alive
from tests.launching import launch_cases as cases
from tests.support.limits import limit_s, until

HERE = os.path.abspath(__file__)


def test_function_of_a_module() -> None:
    assert holdfast.launch(cases.echo, [1, "two"], nproc=2) == {0: (0, [1, "two"]), 1: (1, [1, "two"])}


def test_lambda_and_closure_twice_in_a_row() -> None:
    factor = 6
    assert holdfast.launch(lambda: factor * 7) == {0: 42}

    def closure(number: int) -> int:
        return factor * number

    assert holdfast.launch(functools.partial(closure, number=2)) == {0: 12}


def test_from_a_thread() -> None:
    results: list[dict[int, int]] = []
    thread = threading.Thread(target=lambda: results.append(holdfast.launch(lambda: 1)))
    thread.start()
    thread.join(limit_s(30))
    assert results == [{0: 1}]


def test_function_of_a_module_that_no_path_leads_to() -> None:
    module = types.ModuleType("made_by_an_editor")
    exec("BASE = 40\ndef add(n):\n    return BASE + n\n", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        assert holdfast.launch(module.add, 2) == {0: 42}
    finally:
        del sys.modules[module.__name__]


def test_script_with_its_own_classes(run_cli, tmp_path: Path) -> None:
    """Functions and exceptions of `__main__` come back as the script's own."""
    script = tmp_path / "own.py"
    script.write_text(
        "import holdfast\n"
        "class Mine(Exception): pass\n"
        "class Point:\n    def __init__(self, x): self.x = x\n"
        "def make(x): return Point(x)\n"
        "def fail(): raise Mine('own class')\n"
        "if __name__ == '__main__':\n"
        "    print(type(holdfast.launch(make, 3)[0]) is Point, flush=True)\n"
        "    try:\n        holdfast.launch(fail)\n"
        "    except holdfast.WorkerFailedError as error:\n"
        "        print(type(error.__cause__) is Mine, error.__cause__)\n"
    )
    (tmp_path / "nothing.py").write_text("")
    done = run_cli([], module="own", cwd=tmp_path)
    assert done.code == 0, done
    assert done.out.splitlines() == ["True", "True own class"], done


# --- failures ---------------------------------------------------------------------------------------------------------


def test_exception_of_a_worker_is_the_cause() -> None:
    with pytest.raises(holdfast.WorkerFailedError) as caught:
        holdfast.launch(cases.raise_custom, 1, nproc=2)
    failed, cause = caught.value, caught.value.__cause__
    assert (failed.rank, failed.exit_code, failed.verdict_code) == (1, 1, "HF201")
    assert failed.host in str(failed)
    assert "raised CustomError: ('the loss is a pineapple', 7)" in str(failed)
    assert os.path.exists(failed.log_file)
    assert os.path.isdir(failed.run_folder)
    assert isinstance(cause, cases.CustomError)
    assert cause.number == 7
    shown = str(cause.__cause__)
    assert f'File "{cases.__file__}"' in shown
    assert "raise CustomError" in shown
    assert "call.py" not in shown


@pytest.mark.parametrize(
    ("function", "text"),
    [(cases.raise_unloadable, "UnloadableError: one and two"), (cases.raise_unpicklable, "holds a generator")],
)
def test_exception_that_cannot_travel_is_told_by_its_text(function, text: str) -> None:
    with pytest.raises(holdfast.WorkerFailedError) as caught:
        holdfast.launch(function)
    assert type(caught.value.__cause__).__name__ == "RemoteTracebackError"
    assert text in str(caught.value.__cause__)
    assert f'File "{cases.__file__}"' in str(caught.value.__cause__)


def test_rank_that_just_exits() -> None:
    with pytest.raises(holdfast.WorkerFailedError, match=r"rank 1 on \S+ ended with exit code 5") as caught:
        holdfast.launch(cases.leave, 1, 5, nproc=2)
    assert (caught.value.rank, caught.value.exit_code, caught.value.__cause__) == (1, 5, None)


def test_rank_that_exits_with_0_before_its_result() -> None:
    with pytest.raises(errors.WorkerError, match="rank 0 ended with exit code 0 before the function had returned"):
        holdfast.launch(cases.exit_early)


def test_restart_then_success() -> None:
    """The answer of the failed attempt is gone."""
    assert holdfast.launch(cases.fail_once, nproc=2, max_restarts=1) == {0: 1, 1: 1}


def test_result_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(holdfast.WorkerFailedError, match=r"the result of rank 0 \(generator\) cannot be pickled"):
        holdfast.launch(cases.generator)


def test_arguments_and_functions_that_cannot_be_pickled_are_named() -> None:
    with pytest.raises(errors.PicklingError, match=r"^argument 1 of the function \(generator\) cannot be pickled"):
        holdfast.launch(cases.echo, 1, cases.generator())
    lock = threading.Lock()
    with pytest.raises(errors.PicklingError, match=r"^the function .*<lambda> \(or what it refers to\) cannot"):
        holdfast.launch(lambda: lock)


def test_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(errors.MissingPackageError, match=r"pip install 'holdfast\[python\]'"):
        holdfast.launch(cases.echo, 1)


def test_errors_survive_pickling() -> None:
    import pickle

    error = errors.WorkerFailedError("text", exit_code=5, rank=3, host="h")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.exit_code, again.rank, again.host) == ("text", 5, 3, "h")


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "kind", "text"),
    [
        ({"nproc": 0}, errors.ProcessesError, "at least 1"),
        ({"nproc": "gpus"}, errors.ProcessesError, "did you mean gpu"),
        ({"nnodes": "3:1"}, errors.NodesError, "above the maximum"),
        ({"max_restarts": -1}, errors.UsageError, "0 or more"),
        ({"nnodes": 2, "rdzv_endpoint": "host:99999"}, errors.EndpointError, "99999"),
        ({"nnodes": 2, "rdzv_endpoint": "host", "rdzv_backend": "carrier"}, errors.RendezvousConfigError, "carrier"),
        ({"tee": {0: 9}}, errors.LogOptionsError, "RANK:N"),
        ({"log_dir": HERE}, errors.LogDirError, "is a file"),
        ({"numa_binding": "moon"}, errors.UsageError, "moon"),
        ({"env": {"A": 1}}, errors.UsageError, "env={'A': 1}"),
        ({"nnodes": 2, "rdzv_endpoint": "host", "start_timeout": -1}, errors.RendezvousConfigError, "join_timeout"),
        ({"timeout": 0}, errors.UsageError, "timeout=0"),
    ],
)
def test_bad_parameters_are_refused_as_on_the_command_line(parameters, kind, text: str) -> None:
    with pytest.raises(kind, match=text.replace("{", r"\{")) as caught:
        holdfast.launch(cases.echo, 1, **parameters)
    assert type(caught.value) is kind


def test_what_is_no_function() -> None:
    with pytest.raises(errors.UsageError, match="not callable"):
        holdfast.launch(3)  # type: ignore[arg-type]


def test_environment_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given variables arrive; PET_ variables neither count nor arrive; the launching worker's error file stays its own."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/nowhere")
    names = ("GIVEN", "ROLE_NAME", "WORLD_SIZE", "LOCAL_RANK", "PET_NO_PYTHON", "MASTER_ADDR", "HOLDFAST_TOKEN")
    results = holdfast.launch(cases.environment, *names, nproc=2, env={"GIVEN": "x y"}, role="trainer", token="secret")
    assert results[1][:5] == ["x y", "trainer", "2", "1", None]
    assert results[1][5]
    assert results[1][6] is None
    (error_file,) = holdfast.launch(cases.environment, "TORCHELASTIC_ERROR_FILE")[0]
    assert error_file.endswith("error.json")


def test_log_options(tmp_path: Path) -> None:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        holdfast.launch(cases.say, "out", nproc=2, log_dir=tmp_path, local_ranks_filter=[1], tee={0: 3, 1: 3})
    assert text.getvalue().count("out") == 1
    assert sorted(path.parent.name for path in tmp_path.rglob("stdout.log") if path.read_text() == "out\n") == [
        "0",
        "1",
    ]


def test_output_reaches_a_stdout_that_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    holdfast.launch(cases.say, "grüße", nproc=2)
    out = capsys.readouterr().out
    # Shown once if they came within log_fold.FOLD_S.
    assert [line.partition("| ")[2] for line in out.splitlines()] in (["grüße (×2)"], ["grüße", "grüße"])


def test_output_reaches_a_notebook() -> None:
    """Its stdout is no file although it has a fileno(): the terminal in which the kernel was started."""

    class Notebook(io.StringIO):
        def fileno(self) -> int:
            return 1

    with contextlib.redirect_stdout(Notebook()) as cell, contextlib.redirect_stderr(Notebook()) as errors_cell:
        holdfast.launch(cases.say, "cell")
    assert cell.getvalue().endswith("cell\n")
    assert errors_cell.getvalue() == ""


def test_output_reaches_a_stdout_that_is_a_file(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    holdfast.launch(cases.say, "within")
    print("after")
    assert [line.rpartition(" ")[2] for line in capfd.readouterr().out.splitlines()] == ["before", "within", "after"]


# --- larger things ----------------------------------------------------------------------------------------------------


def test_large_arguments_and_results() -> None:
    size = 100_000_000
    results = holdfast.launch(cases.large, size)
    assert len(results[0]) == size
    assert holdfast.launch(len, results[0], nproc=2) == {0: size, 1: size}


def test_launch_within_a_launch() -> None:
    assert holdfast.launch(cases.nested, 2) == {0: {0: (0, "inner"), 1: (1, "inner")}}


@pytest.mark.xdist_group("torch jobs")
def test_all_reduce() -> None:
    offline = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert holdfast.launch(cases.all_reduce, nproc=2, env=offline) == {0: 3.0, 1: 3.0}


def test_import_is_free_of_cost(run_cli, tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(
        "import sys; before = set(sys.modules); import holdfast; print(*sorted(set(sys.modules) - before))\n"
        "import holdfast.worker.record; assert holdfast.record is holdfast.worker.record.record\n"
        "assert 'launch' in dir(holdfast)\n"
    )
    done = run_cli([], module="probe", cwd=tmp_path)
    assert done.code == 0, done
    assert set(done.out.split()) <= {"holdfast", "holdfast.version", "__future__"}
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        holdfast.lunch  # noqa: B018


# --- how a launch is ended from outside: interrupts, time-outs, deaths, and jobs of two nodes -------------------------


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
        supervisor = process_stat(pids(tmp_path)[0]).parent
        os.kill(process_stat(supervisor).parent, signum)

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
    until(lambda: not any(alive(pid) for pid in pids(tmp_path)), "no worker")


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

"""The command itself: sub-commands, help, version, what it costs, and the order in which things are done."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast.cli.run
import holdfast.run
from holdfast.cli import COMMANDS, main, print_version, run_command
from holdfast.cli.option_table import LAUNCH_OPTIONS, OPTIONS, Option
from holdfast.version import __version__
from tests.support.limits import limit_s

HELP_KIB_MAX = 13 * 1024
HELP_MODULES_MAX = 30
"""What help costs is what it imports: the time itself is a row of the benchmarks."""

WHAT_WAS_LOADED = """
import sys, json
bare = set(sys.modules)
import holdfast.cli
status = holdfast.cli.main({argv!r})
json.dump([status, sorted(set(sys.modules) - bare)], sys.stderr)
"""


def loaded(*argv: str) -> list[str]:
    """Modules that a command line loads."""
    done = subprocess.run(
        [sys.executable, "-c", WHAT_WAS_LOADED.format(argv=list(argv))], capture_output=True, text=True, check=True
    )
    return json.loads(done.stderr.strip().splitlines()[-1])[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "argv", [("--help",), ("--version",), ("run", "--help"), ("run", "--version"), ("launch", "-h")]
)
def test_help_loads_nothing_but_a_bit_of_the_standard_library(argv: tuple[str, ...]) -> None:
    modules = {name.partition(".")[0] for name in loaded(*argv)} - {"holdfast"}
    assert modules <= set(sys.stdlib_module_names)
    assert not modules & {
        "msgspec",
        "torch",
        "dataclasses",
        "asyncio",
        "socket",
        "argparse",
        "difflib",
        "inspect",
        "tomllib",
    }


def test_importing_the_command_loads_no_third_party_module() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; b = set(sys.modules); import holdfast.cli; print(*set(sys.modules) - b)"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = {name.partition(".")[0] for name in done.stdout.split()} - {"holdfast"}
    assert modules <= set(sys.stdlib_module_names)


PEAK = """
import sys
from holdfast.cli import main
main(["run", "--help"])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")), file=sys.stderr)
"""


@pytest.mark.usefixtures("unmeasured")
def test_help_is_small() -> None:
    assert len(loaded("run", "--help")) <= HELP_MODULES_MAX
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert int(done.stderr) < HELP_KIB_MAX


@pytest.mark.parametrize(("command", "table"), [("run", OPTIONS), ("launch", LAUNCH_OPTIONS)])
def test_help_lists_every_option(command: str, table: tuple[Option, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    options = [" ".join(each.split()) for each in re.split(r"\n  (?=-)", text)[1:]]
    assert len(options) == len(table)
    for option in table:
        (line,) = (line for line in options if option.name in line.split()[:2])
        assert option.help in line
        assert option.variable in line
        assert option.short in line


def test_top_level(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert max(map(len, text.splitlines())) <= 80
    assert main(["--version"]) == main(["run", "--version"]) == print_version() == 0
    assert capsys.readouterr().out == f"holdfast {__version__}\n" * 3
    assert main(["--version", "--verbose"]) == 0
    assert re.fullmatch(
        rf"holdfast {re.escape(__version__)}\ncommit [0-9a-f]{{40}}(-dirty)?\n"
        r"Python 3\.\S+\ntorch .+\nkernel Linux \S+\n",
        capsys.readouterr().out,
    )
    assert main([]) == 2
    assert "usage: holdfast COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["rnu"], "'rnu' is not a command; did you mean run?"),
        (["plan", "train.py"], "'plan' is not a command; did you mean run --plan?"),
        (["ps"], "'ps' is not a command; did you mean status?"),
        (["lanch", "x.py"], "did you mean launch?"),
        (["zzzz"], "the commands are run, launch"),
        (["train.py"], "write: holdfast run train.py"),
        (["--nnodes", "2", "x.py"], "write: holdfast run --nnodes"),
    ],
)
def test_no_such_command(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("holdfast: HF101: ")
    assert said in err


def test_elsewhere_than_linux(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["run", "x.py"]) == 2
    assert capsys.readouterr().err == "holdfast: HF112: holdfast runs on Linux; this is darwin\n"


def test_python_m_holdfast_run_is_holdfast_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "x.py"
    script.touch()
    assert holdfast.run.main(["--plan", str(script)]) == 0
    one = capsys.readouterr().out
    assert main(["run", "--plan", str(script)]) == 0
    assert capsys.readouterr().out == one


@pytest.mark.parametrize("module", ["holdfast", "holdfast.run"])
def test_real_processes_say_one_line_and_leave_nothing(module: str, tmp_path: Path) -> None:
    argv = ["run"] if module == "holdfast" else []
    done = subprocess.run(
        [sys.executable, "-m", module, *argv, "--nnodes", "3:1", "x.py"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "holdfast: HF103: --nnodes 3:1: the minimum 3 is above the maximum 1\n"


def test_launch_says_that_it_is_deprecated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "x.py"
    script.touch()
    assert main(["launch", "--plan", "--nproc-per-node=2", str(script), "a"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("holdfast: FutureWarning: ")
    assert err.count("\n") == 1
    assert f"-u {script} --local-rank=1 a" in out
    assert main(["launch", "--plan", "--use-env", str(script), "a"]) == 0
    assert f"-u {script} a" in capsys.readouterr().out
    assert main(["launch", "--no-python", "sh"]) == 2
    assert "holdfast: HF101: holdfast launch --no-python needs --use-env as well" in capsys.readouterr().err
    assert main(["run", "--use-env", str(script)]) == 2


# --- an output that does not take everything --------------------------------------------------------------------------


def printed(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, **variables}
    return subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=limit_s(60))


def test_a_terminal_that_knows_ascii_alone() -> None:
    done = printed('"$PYTHON" -m holdfast explain HF212', PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "`GLIBC_\\u2026 not found`" in done.stdout


def test_an_output_that_is_closed_or_full() -> None:
    assert printed('"$PYTHON" -m holdfast explain HF212 >&-').stderr == ""
    full = printed('"$PYTHON" -m holdfast explain HF212 > /dev/full')
    assert full.returncode == 1
    assert full.stderr == "holdfast: the output cannot be written: No space left on device\n"


INTERRUPTED_WHILE_IMPORTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
        return None

import holdfast.cli
sys.meta_path.insert(0, Interrupting())
sys.exit(holdfast.cli.main(["run", {script!r}]))
"""


@pytest.mark.parametrize(
    "module",
    [
        "holdfast.protocol.errors",
        "holdfast.cli.grammar",
        "holdfast.cli.resolve",
        "holdfast.runtime.agent_service",
        "asyncio",
    ],
)
def test_ctrl_c_while_we_are_being_imported_is_one_line(module: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    program = INTERRUPTED_WHILE_IMPORTING.format(module=module, script=str(script))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "holdfast: ended by Ctrl-C; exit code 130\n")


def test_ctrl_c_while_a_named_tuple_is_made_has_the_same_exit_code(tmp_path: Path) -> None:
    """Its definition is a string that Python runs. `python -m` would end by SIGINT after a KeyboardInterrupt in one."""
    interrupted = "holdfast.cli.run_line = lambda _: exec('import signal; signal.raise_signal(signal.SIGINT)')"
    (tmp_path / "command.py").write_text(f"import holdfast.cli\n{interrupted}\nholdfast.cli.entry()\n")
    done = subprocess.run([sys.executable, "-m", "command"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "holdfast: ended by Ctrl-C; exit code 130\n")


def test_the_command_is_imported_before_anybody_can_press_ctrl_c() -> None:
    """What Python's own start did not load costs time in which Ctrl-C shows our imports' traceback."""
    program = f"import sys; sys.path[:0] = {sys.path!r}; import holdfast.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert not {"typing", "re", "enum", "collections", "signal"} & set(done.stdout.split())


def test_python_m_holdfast_launch_is_holdfast_launch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    command = [sys.executable, "-m", "holdfast.launch", script, "--lr", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "['--local-rank=0', '--lr', '3']" in done.stdout


def test_the_function_can_be_called_also_when_the_module_of_its_name_is_imported() -> None:
    program = "import holdfast, holdfast.launch as module; print(callable(holdfast.launch), module.main(['--version']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["holdfast", __version__, "True", "0"]


@pytest.mark.parametrize("error", [BlockingIOError(11, os.strerror(11)), BrokenPipeError()], ids=repr)
def test_whatever_nobody_caught_is_a_fault_of_ours(
    error: OSError, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also a broken pipe, where it is not that of the output."""

    def broken(_: object) -> int:
        raise error

    monkeypatch.setattr(holdfast.cli.run, "main", broken)
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    assert run_command("run", []) == 70
    said = capfd.readouterr().err
    assert "Traceback" in said
    assert f"HF901: holdfast failed: {type(error).__name__}" in said


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_a_notice_that_cannot_be_written_ends_nothing(where: str) -> None:
    code = "from holdfast.cli import say; say('a notice'); print('goes on')"
    done = printed(f'"$PYTHON" -c "{code}" {where}')
    assert (done.stdout, done.stderr) == ("goes on\n", "")
    assert printed(f'"$PYTHON" -c "{code}"').stderr == "holdfast: a notice\n"

"""Completion scripts in real shells: what the tab key makes of a line."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli import COMMANDS, main
from holdfast.cli.completion import KNOWN_VALUES, SHELLS, commands
from holdfast.cli.option_table import OPTIONS
from tests.support.limits import limit_s
from tests.support.tables import tables

TABLES = tables(__file__)

WAIT_S = 20.0

ASK_BASH = """
source {script}
for line in "${{lines[@]}}"; do
    cut=${{line//=/ = }} cut=${{cut//:/ : }}
    read -ra COMP_WORDS <<< "${{cut//@/ @ }}"
    [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    _holdfast 2>/dev/null
    echo "${{COMPREPLY[*]}}"
done
"""

ASKED = [tuple(each) for each in TABLES["completions"]]


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script for the shell that the test is about."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (Debian: {shell})")
    assert main(["completion", shell]) == 0
    path = tmp_path / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash(script: Path) -> None:
    lines = " ".join(f"'{line}'" for line, _ in ASKED)
    done = subprocess.run(
        ["bash", "--norc", "-u", "-c", f"lines=({lines})" + ASK_BASH.format(script=script)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [*zip((line for line, _ in ASKED), done.stdout.splitlines(), strict=True)] == ASKED


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish(script: Path, tmp_path: Path) -> None:
    asking = "; ".join(f"echo '{line}'; complete -C '{line}'" for line, _ in ASKED)
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {script}; {asking}"],
        capture_output=True,
        text=True,
        cwd=empty,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, set[str]] = {}
    for row in done.stdout.splitlines():
        if row.startswith("holdfast "):
            told[row] = set()
            last = row
        else:
            told[last].add(row.partition("\t")[0].removeprefix("--grow="))
    for line, wanted in ASKED:
        if "nonsense" not in line and "_" not in line:  # fish completes the spelling with dashes alone
            assert told[line] == set(wanted.split()), line


class Terminal:
    """An interactive shell at a terminal of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._main, side = pty.openpty()
        self._process = subprocess.Popen(
            command,
            stdin=side,
            stdout=side,
            stderr=side,
            cwd=folder,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "PS1": "> ", "HOME": str(folder), "ZDOTDIR": str(folder)},
        )
        os.close(side)
        self._text = ""

    def type(self, text: str, until: str) -> str:
        """Type it; what appears up to this regular expression."""
        os.write(self._main, text.encode())
        end_s = time.monotonic() + limit_s(WAIT_S)
        while not (found := re.search(until, self._text)):
            left_s = end_s - time.monotonic()
            if left_s < 0 or not select.select([self._main], [], [], left_s)[0]:
                pytest.fail(f"no {until!r} after {text!r}: {self._text!r}")
            self._text += os.read(self._main, 4096).decode(errors="replace")
        seen, self._text = self._text[: found.end()], self._text[found.end() :]
        return seen

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main)


SHELL_LINES = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], ""),
    "zsh": (["zsh", "-f", "-i"], "unsetopt zle_bracketed_paste; autoload -Uz compinit; compinit -u -D; "),
}


@pytest.fixture
def terminal(script: Path, tmp_path: Path) -> Iterator[Terminal]:
    folder = tmp_path / "work"
    (folder / "folder-of-runs").mkdir(parents=True)
    for name in ("train.py", "numbers.txt"):
        (folder / name).touch()
    command, first = SHELL_LINES[script.suffix[1:]]
    with contextlib.closing(Terminal(command, folder)) as made:
        made.type(f"{first}source {script}; echo re''ady\n", r"ready\r?\n")
        yield made


@pytest.mark.parametrize("script", ["bash", "zsh"], indirect=True)
def test_the_tab_key(terminal: Terminal) -> None:
    for typed, wanted in [
        ("holdfast comp", "holdfast completion "),
        ("holdfast run --gro", "holdfast run --grow"),
        ("holdfast run --grow nev", "holdfast run --grow never "),
        ("holdfast run --grow=nev", "holdfast run --grow=never "),
        ("holdfast run --log-dir fol", "holdfast run --log-dir folder-of-runs/"),
        (
            "holdfast run --nnodes 1:4 --rdzv-endpoint a:1 --grow nev",
            "holdfast run --nnodes 1:4 --rdzv-endpoint a:1 --grow never ",
        ),
        ("holdfast run --standalone tra", "holdfast run --standalone train.py "),
        ("holdfast run train.py --data num", "holdfast run train.py --data numbers.txt "),
        ("holdfast explain HF24", "HF240"),
    ]:
        typed_now = typed + ("\t\t" if wanted.startswith("HF") else "\t")
        terminal.type(typed_now, re.escape(wanted) if wanted.startswith("HF") else spread(typed, wanted))
        terminal.type("\x15echo do''ne\n", r"done\r?\n")


def spread(typed: str, wanted: str) -> str:
    """What the shell adds to what was typed; it may redraw the line meanwhile."""
    return rf"{re.escape(typed)}(\r.*?{re.escape(typed)})?[\x07\x08\x1b\[\dA-Za-z ]*?{re.escape(wanted[len(typed) :].rstrip())}"


def test_every_command_and_option_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    known = {command.name: command for command in commands()}
    assert list(known) == list(COMMANDS)
    names = {name for option in known["run"].options for name in option.names}
    assert names == {name for option in OPTIONS for name in (option.name, option.short) if name}
    assert set(KNOWN_VALUES) <= names
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        out = capsys.readouterr().out
        for option in OPTIONS:
            assert (f"-l {option.name[2:]} " if shell == "fish" else option.name) in out
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == out


@pytest.mark.parametrize("line", [[], ["csh"], ["bash", "zsh"]])
def test_which_shell(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *line]) == 2
    given = f", not {' '.join(line)}" if line else ""
    said = capsys.readouterr().err
    assert said == f"holdfast: HF101: holdfast completion: give one shell of bash, zsh, fish, tcsh{given}\n"
    assert main(["completion", "--help"]) == 0
    assert "source <(holdfast completion bash)" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_run_prints_it_as_a_later_torchrun_does(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    expected = capsys.readouterr().out
    assert main(["run", "--print-completion", shell]) == 0
    assert capsys.readouterr().out == expected
    assert main(["run", "--print-completion", "fish"]) == 2

"""The parser beside torchrun's: the same line gives the same values, or is refused by both."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.grammar import parse
from holdfast.cli.option_table import LAUNCH_OPTIONS, OPTIONS, Option
from holdfast.protocol.errors import CallerError, UsageError
from tests.beside_torchrun.beside import Launchers, Line, Side
from tests.beside_torchrun.installed import TORCHRUNS, skip_what_it_lacks
from tests.beside_torchrun.recording import Book, Mode
from tests.support.tables import tables

TABLES = tables(__file__)

OWN = {option.dest for option in OPTIONS if option.ours}
"""Options of ours that torchrun does not have (argparse keeps no value of --help)."""

NEWER = {option.dest for option in OPTIONS if option.newer}
"""Options that torchrun has only since 2.14."""
DEFAULTS = vars(parse(["train.py"], {}, OPTIONS).values)
"""The values of a line without options."""

LINES = TABLES["lines"]

REFUSED = TABLES["refused_by_torchrun"]

ENVIRONMENTS = TABLES["environments"]

VARIABLES = ("PET_", "MASTER_")


@dataclass
class Parser:
    """torchrun's parser, or what it was recorded to make of a line: the values that differ from those of `train.py`."""

    mode: Mode
    book: Book

    def run(self, argv: list[str]) -> dict[str, object] | None:
        """The values of a line of torchrun; None when it refuses it."""
        skip_what_it_lacks(self.mode, argv, os.environ)
        return self.values("run", argv)

    def launch(self, argv: list[str]) -> dict[str, object] | None:
        """The values of a line of torch.distributed.launch."""
        return self.values("launch", argv)

    def ours(self, argv: list[str]) -> dict[str, object] | None:
        """What we make of the line: the values that torchrun has too. None: refused."""
        try:
            parsed = parse(argv, os.environ, OPTIONS)
        except CallerError:
            return None
        return self.as_torchruns("run", vars(parsed.values))

    def as_torchruns(self, program: str, values: dict[str, object]) -> dict[str, object]:
        """Our values as this torchrun has them: without the options that it lacks, and with its own defaults. An older
        one has another default for --master-port."""
        without, defaults = OWN | self.missing(), self._defaults(program)
        given = {name: value for name, value in values.items() if name not in without}
        return {name: defaults[name] if value == DEFAULTS.get(name) else value for name, value in given.items()}

    def missing(self) -> set[str]:
        """The options that only a later torchrun has."""
        return TORCHRUNS - set(self.options())

    def _defaults(self, program: str) -> dict[str, object]:
        found: dict[str, object] = self._kept(f"{program}, defaults", lambda: default_values(program))
        return found

    def options(self) -> dict[str, dict[str, list[str]]]:
        """Spellings and choices of each option of torchrun, by the name of its value."""

        def live() -> object:
            actions = importlib.import_module("torch.distributed.run").get_args_parser()._actions
            return {
                action.dest: {"spellings": list(action.option_strings), "choices": list(action.choices or [])}
                for action in actions
                if action.option_strings
            }

        return dict(self._kept("options", live))

    def values(self, program: str, argv: list[str]) -> dict[str, object] | None:
        """Those of a line, also with options that the installed torchrun lacks; None: it is refused."""
        pets = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
        defaults = self._defaults(program)
        changed = self._kept(shlex.join([*pets, program, *argv]), lambda: changes(live_values(program, argv), defaults))
        return None if changed is None else {**defaults, **changed}

    def _kept(self, key: str, live: Any) -> Any:
        if self.mode is Mode.REPLAY:
            assert key in self.book.runs, f"torchrun was not recorded for {key}: make record-torchrun"
            return self.book.runs[key]
        if self.mode is Mode.RECORD or key not in self.book.runs:
            self.book.runs[key] = live()
        else:
            assert live() == self.book.runs[key], f"torchrun does not do what is recorded: {key}"
        return self.book.runs[key]


def live_values(program: str, argv: list[str]) -> dict[str, object] | None:
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return dict(vars(importlib.import_module(f"torch.distributed.{program}").parse_args(argv)))
        except SystemExit as end:
            return None if end.code == 2 else {"exit": end.code}


def default_values(program: str) -> dict[str, object] | None:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(VARIABLES)]:
            patch.delenv(name)
        return live_values(program, ["train.py"])


def changes(values: dict[str, object] | None, defaults: dict[str, object]) -> dict[str, object] | None:
    if values is None:
        return None
    return {name: value for name, value in values.items() if name not in defaults or defaults[name] != value}


@pytest.fixture
def torchrun(torchrun_mode: Mode, torchrun_book: Book) -> Parser:
    return Parser(torchrun_mode, torchrun_book)


@pytest.mark.parametrize("line", LINES)
def test_a_line_means_what_it_means_to_torchrun(torchrun: Parser, line: str) -> None:
    argv = shlex.split(line)
    expected = torchrun.run(argv)
    assert expected is not None
    assert torchrun.ours(argv) == expected


@pytest.mark.parametrize("line", REFUSED)
def test_a_line_that_torchrun_refuses_is_refused(torchrun: Parser, line: str) -> None:
    argv = shlex.split(line)
    assert torchrun.run(argv) is None
    with pytest.raises(UsageError):
        parse(argv, os.environ, OPTIONS)


@pytest.mark.parametrize("environ", ENVIRONMENTS, ids="+".join)
@pytest.mark.parametrize("line", ["train.py", "--nnodes 5 --role r -r 1 --max-restarts 1 --rdzv-id i train.py"])
def test_variables_mean_what_they_mean_to_torchrun(
    torchrun: Parser, environ: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    argv = shlex.split(line)
    assert torchrun.ours(argv) == torchrun.run(argv) is not None


def test_every_prefix_that_torchrun_takes_is_taken_for_the_same_option(torchrun: Parser) -> None:
    spellings = [name for option in torchrun.options().values() for name in option["spellings"]]
    prefixes = {name[:length] for name in spellings if name.startswith("--") for length in range(3, len(name) + 1)}
    assert len(prefixes) > 250
    newer = {name for option in OPTIONS if option.newer for name in option.spellings}
    missing = torchrun.missing()
    later = {name for option in OPTIONS if option.dest in missing - NEWER for name in option.spellings}
    for prefix in sorted(prefixes - {"--h", "--he", "--hel", "--help"}):
        for argv in ([prefix, "train.py"], [prefix, "1", "train.py"], [prefix + "=1", "train.py"]):
            theirs = torchrun.values("run", argv)
            if any(name.startswith(prefix) for name in newer) and theirs is None:
                continue  # ambiguous since that torchrun: here it still means what it meant before
            if any(name.startswith(prefix) for name in later):
                continue  # ambiguous with an option that this torchrun does not have yet
            assert torchrun.ours(argv) == theirs, argv


def test_what_follows_the_script_is_never_judged(torchrun: Parser) -> None:
    """argparse refuses `train.py --m 3` as ambiguous, though it is the script's own."""
    assert torchrun.run(["train.py", "--m", "3"]) is None
    parsed = parse(["train.py", "--m", "3"], {}, OPTIONS)
    assert parsed.values.training_script_args == ["--m", "3"]
    assert parsed.notices == ()


def test_launch_has_torchs_use_env(torchrun: Parser) -> None:
    for argv in (["x.py"], ["--use-env", "x.py"], ["--use_env", "-m", "x"], ["x.py", "--use-env"]):
        got = vars(parse(argv, {}, LAUNCH_OPTIONS).values)
        assert torchrun.as_torchruns("launch", got) == torchrun.launch(argv)


def test_the_options_that_are_not_ours_are_torchruns(torchrun: Parser) -> None:
    theirs = torchrun.options()
    table: dict[str, Option] = {option.dest: option for option in OPTIONS if not option.ours}
    assert set(table) - torchrun.missing() == set(theirs) - {"help"}
    for dest, option in table.items():
        if dest in torchrun.missing():
            continue
        assert set(option.spellings) == set(theirs[dest]["spellings"]), dest
        assert option.variable == ("" if dest == "print_completion" else "PET_" + dest.upper())
        assert list(option.choices or []) == theirs[dest]["choices"]


@pytest.mark.parametrize(
    ("word", "dest"),
    [
        ("--log-d", "log_dir"),
        ("--log-line", "log_line_prefix_template"),
        ("--log_line_prefix_template", "log_line_prefix_template"),
    ],
)
def test_an_option_of_a_later_torchrun_has_its_beginnings(word: str, dest: str) -> None:
    assert parse([f"{word}=x", "train.py"], {}, OPTIONS).sources[dest] == "flag"


def test_an_option_of_a_later_torchrun_takes_no_beginning_from_an_older_one() -> None:
    assert parse(["--log-", "x", "train.py"], {}, [each for each in OPTIONS if each.name != "--logs-specs"]).given(
        "log_dir"
    )
    with pytest.raises(UsageError, match="--log-dir or") as error:
        parse(["--log=x", "train.py"], {}, OPTIONS)
    assert "--log-line" not in str(error.value)


# --- lines that cannot be run: one or two lines with a code and exit 2, where torchrun fails as well ------------------


SAME, STRICTER, SLOW = "", "torchrun runs it, or waits for minutes", "torchrun refuses it after importing torch again"
"""torchrun is asked for the first kind only."""

BAD = TABLES["refused_lines"]


@pytest.mark.parametrize(("line", "env", "code", "compared"), BAD)
def test_a_bad_line(
    launchers: Launchers, tmp_path: Path, line: str, env: dict[str, str], code: str, compared: str
) -> None:
    state = tmp_path / "state"
    bad = Line(shlex.split(line), {"XDG_STATE_HOME": str(state), "TMPDIR": str(tmp_path), **env})
    other = launchers.torchrun(bad) if compared == SAME else None
    job = launchers.holdfast(bad)
    if other is not None:
        theirs = other.finish()
        assert theirs.code in (1, 2), theirs
        assert theirs.probes() == {}
    ours = job.finish()
    assert ours.code == 2, ours
    said = ours.err.splitlines()
    assert 1 <= len(said) <= 2, ours
    assert re.match(rf"holdfast: {code}: \S", said[0]), ours
    assert ours.out == ""
    assert untouched(ours, state)


def untouched(ours: Side, state: Path) -> bool:
    return not state.exists() and not ours.logs.exists() and ours.probes() == {}


def test_a_module_that_does_not_exist_is_refused_before_anything_starts(launchers: Launchers) -> None:
    """Only its top-level name is looked for: finding the rest would mean importing the package."""
    theirs, ours = launchers.pair("-m", "missing.module")
    assert (theirs.code, ours.code) == (1, 2), f"{theirs}\n{ours}"
    assert "No module named 'missing'" in theirs.err
    assert ours.err.startswith("holdfast: HF102: no module named 'missing': it is neither installed nor in ")


KINDER = [
    # torchrun fails at these.
    ("probe.py", {"PET_STANDALONE": "true"}),
    ("-r 10:1,0:1 probe.py", {}),
    ("probe.py --m 3 --n", {}),
    ("--log-dir /dev/null -t 1 --duplicate-stdout-filters a probe.py", {}),
    ("--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id a/b --log-dir {logs} probe.py", {}),
]


@pytest.mark.parametrize(("line", "env"), KINDER)
def test_lines_that_only_torchrun_refuses(launchers: Launchers, line: str, env: dict[str, str]) -> None:
    theirs, ours = launchers.pair(*shlex.split(line), env=env)
    assert theirs.code in (1, 2), theirs
    assert ours.code == 0, ours
    assert list(ours.probes()) == ["0.0"]

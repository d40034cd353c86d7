"""The parser beside torchrun's: the same line gives the same values, or is refused by both."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shlex
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast.cli.grammar import parse
from holdfast.cli.options import LAUNCH_OPTIONS, OPTIONS, Option
from holdfast.core.errors import CallerError, UsageError
from tests.beside_torchrun.recording import Book, Mode

OWN = {
    "drain_timeout",
    "exclude_after",
    "grow",
    "hang_timeout",
    "health",
    "help",
    "metrics",
    "no_dedup",
    "plan",
    "preempt_signal",
    "preload",
} | {
    "config",
    "no_config",
    "slurm",
    "standby",
    "version",
    # several hosts by ssh
    "cwd",
    "env",
    "exclude",
    "host_discovery",
    "hostfile",
    "hosts",
    "include",
    "on_disconnect",
    "python",
    "ssh",
}
"""Options of ours that torchrun does not have (argparse keeps no value of --help)."""

NEWER = {option.dest for option in OPTIONS if option.newer}
"""Options that not every torchrun has with which we compare."""

LINES = """
train.py
train.py --lr 3 --nnodes 7
-- train.py a b
-- train.py -- a
train.py -- a
train.py -- a -- b
train.py a -- b
train.py -m -r 3
--nnodes 2 train.py
--nnodes=1:4 train.py
--nnodes= train.py
--nnode 2 train.py
--nproc-per-node 4 train.py
--nproc_per_node=gpu train.py
--nproc_per 2 train.py
--nproc-per-node -1 train.py
--nproc-per-node -1.5 train.py
-1 a
-m pkg.mod a b
--module pkg.mod
-mr3 pkg.mod
-mr 3 pkg.mod
-r3 -t1 train.py
-r=3 -t 0:1,1:2 train.py
--redirect=3 --tee 2 train.py
--rdzv-backend c10d --rdzv-endpoint host:1234 --rdzv-id x train.py
--rdzv_backend=c10d --rdzv_endpoint=host:1234 --rdzv_id=x train.py
--rdzv-conf join_timeout=3,a=b train.py
--stand train.py
--standalone --nproc-per-node=2 train.py --standalone
--max-restarts 3 --monitor-interval 5 train.py
--max_restarts=-3 train.py
--monitor_interval=1e-2 train.py
--start-method fork --run-path train.py
--no-python ./prog -c 3
--no_python /bin/echo hi
--role trainer --role other train.py
--role 'a b' train.py
--role '' train.py
--role=-x train.py
'--role=a b' train.py
'a b.py' c
'- b.py' c
'-x y.py' c
- a
'' a
--log-dir /tmp/x --local-ranks-filter 0,1 train.py
--duplicate-stdout-filters a,b,,c --duplicate_stderr_filters x train.py
--duplicate-stdout-filters '' train.py
--node-rank 1 --master-addr h --master-port 29501 train.py
--node_rank=1 --master_addr=h --master_port=29501 train.py
--local-addr 10.0.0.1 train.py
--logs-specs default --numa-binding node train.py
--signals-to-handle SIGUSR1 --shutdown-timeout 5 train.py
--virtual-local-rank train.py
--virtual_local_rank --event-log-handler console train.py
--nnodes 2 -- train.py
--role x -- --odd a
-- -m a
"""

REFUSED = """

--standalone
--nnodes
--nnodes -- 2 train.py
--nnodes --role x train.py
--role -x train.py
--nproc 2 train.py
--m 2 train.py
--rdzv x train.py
--unknown train.py
-x train.py
-mx train.py
--max-restarts two train.py
--max-restarts 1.5 train.py
--monitor-interval x train.py
--master-port http train.py
--node-rank '' train.py
--start-method thread train.py
--numa-binding nodes train.py
--standalone=1 train.py
-m=1 train.py
--shutdown-timeout 1.5 train.py
--nproc_per-node 2 train.py
--
"""

ENVIRONMENTS: list[dict[str, str]] = [
    {"PET_NNODES": "2:3", "PET_NPROC_PER_NODE": "gpu"},
    {"PET_STANDALONE": "1", "PET_MODULE": "0", "PET_NO_PYTHON": "7"},
    {"PET_RUN_PATH": " 1 ", "PET_VIRTUAL_LOCAL_RANK": "-1"},
    {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "h:1", "PET_RDZV_ID": "", "PET_RDZV_CONF": "a=b"},
    {"PET_MAX_RESTARTS": "3", "PET_MONITOR_INTERVAL": "0.5", "PET_SHUTDOWN_TIMEOUT": "9"},
    {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h", "PET_MASTER_PORT": "1", "PET_LOCAL_ADDR": "l"},
    {"PET_LOG_DIR": "/x", "PET_REDIRECTS": "3", "PET_TEE": "1", "PET_LOCAL_RANKS_FILTER": "0"},
    {"PET_DUPLICATE_STDOUT_FILTERS": "a,,b,c", "PET_DUPLICATE_STDERR_FILTERS": ""},
    {"PET_ROLE": "", "PET_START_METHOD": "fork", "PET_EVENT_LOG_HANDLER": "console", "PET_SIGNALS_TO_HANDLE": ""},
    {"PET_R": "3", "PET_T": "3", "PET_M": "1", "MASTER_ADDR": "no", "MASTER_PORT": "1", "PET_HELP": "1"},
]

VARIABLES = ("PET_", "MASTER_")


@dataclass
class Parser:
    """torchrun's parser, or what it was recorded to make of a line: the values that differ from those of `train.py`."""

    mode: Mode
    book: Book

    def run(self, argv: list[str]) -> dict[str, object] | None:
        """The values of a line of torchrun; None when it refuses it."""
        return self._values("run", argv)

    def launch(self, argv: list[str]) -> dict[str, object] | None:
        """The values of a line of torch.distributed.launch."""
        return self._values("launch", argv)

    def ours(self, argv: list[str]) -> dict[str, object] | None:
        """What we make of the line: the values that torchrun has too. None: refused."""
        try:
            parsed = parse(argv, os.environ, OPTIONS)
        except CallerError:
            return None
        without = OWN | self.missing()
        return {name: value for name, value in vars(parsed.values).items() if name not in without}

    def missing(self) -> set[str]:
        """The options that only a later torchrun has."""
        return NEWER - set(self.options())

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

    def _values(self, program: str, argv: list[str]) -> dict[str, object] | None:
        pets = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
        defaults = self._kept(f"{program}, defaults", lambda: default_values(program))
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


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_a_line_means_what_it_means_to_torchrun(torchrun: Parser, line: str) -> None:
    argv = shlex.split(line)
    expected = torchrun.run(argv)
    assert expected is not None
    assert torchrun.ours(argv) == expected


@pytest.mark.parametrize("line", REFUSED.splitlines()[1:])
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
    assert len(prefixes) > 300
    newer = {spelling for option in OPTIONS if option.newer for spelling in option.spellings}
    for prefix in sorted(prefixes - {"--h", "--he", "--hel", "--help"}):
        for argv in ([prefix, "train.py"], [prefix, "1", "train.py"], [prefix + "=1", "train.py"]):
            if any(name.startswith(prefix) for name in newer) and torchrun.run(argv) is None:
                continue  # ambiguous since that torchrun: here it still means what it meant before
            assert torchrun.ours(argv) == torchrun.run(argv), argv


def test_what_follows_the_script_is_never_judged(torchrun: Parser) -> None:
    """argparse refuses `train.py --m 3` as ambiguous, though it is the script's own."""
    assert torchrun.run(["train.py", "--m", "3"]) is None
    parsed = parse(["train.py", "--m", "3"], {}, OPTIONS)
    assert parsed.values.training_script_args == ["--m", "3"]
    assert parsed.notices == ()


def test_launch_has_torchs_use_env(torchrun: Parser) -> None:
    for argv in (["x.py"], ["--use-env", "x.py"], ["--use_env", "-m", "x"], ["x.py", "--use-env"]):
        got = vars(parse(argv, {}, LAUNCH_OPTIONS).values)
        assert {name: value for name, value in got.items() if name not in OWN | torchrun.missing()} == torchrun.launch(
            argv
        )


def test_the_table_is_torchruns_and_a_frozen_list_of_our_own(torchrun: Parser) -> None:
    """Who adds an option of ours names it here, after looking at the prefixes above."""
    own = "--preload --standby --grow --drain-timeout --preempt-signal --hang-timeout --exclude-after --metrics --health --no-dedup --slurm"
    own += " --hosts --hostfile --include --exclude --host-discovery --env --ssh --python --cwd --on-disconnect --config --no-config --help --plan"
    assert [option.name for option in OPTIONS if option.ours] == [*own.split(), "--version"]
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

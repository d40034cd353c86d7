"""Lines of a run: what they resolve to, what the other nodes are started with, and what is refused with one message."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import uuid
from pathlib import Path

import pytest

from holdfast.cli import main, run
from holdfast.cli.devices import Probes
from holdfast.cli.grammar import parse
from holdfast.cli.option_table import FLAG, FLOAT, INT, LAUNCH_OPTIONS, OPTIONS, Option
from holdfast.cli.resolve import Resolution, resolve
from holdfast.protocol.errors import EnvironmentValueError, UsageError
from holdfast.protocol.options import CommandKind, Endpoint, RunOptions, Std
from holdfast.protocol.train_contract import Survive
from holdfast.run_folder import default_log_dir
from tests.support.tables import tables

TABLES = tables(__file__)

PROBES = Probes(nvml=lambda: ["GPU-a", "GPU-b"], torch=lambda name: 3, backends=lambda _: True, cpus=8)


NOT_USABLE = {
    "nb.ipynb": b'{"cells": []}',
    "broken.py": b"x = 1\ny = = 2\n",
    "job.sh": b"#!/bin/bash\nexport A=1\n",
    "elf": b"\x7fELF\2\1\1",
    "crlf": b"#!/bin/sh\r\necho\r\n",
    "crlf-env": b"#!/usr/bin/env bash\r\necho\r\n",
    "plain": b"echo 1\n",
    "plain.py": b"print(1)\n",
    "bom": b"\xef\xbb\xbf#!/bin/sh\n",
    "strange": b"#!/no/such/python -u\n",
    "nothing": b"",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("")
    (tmp_path / "prog").write_text("#!/bin/sh\n")
    (tmp_path / "prog").chmod(0o755)
    (tmp_path / "secret").write_bytes(b"s3cret\n")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "nothing_in_it").write_text("\n")
    (tmp_path / "empty").mkdir()
    for name, content in NOT_USABLE.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def resolution(line: str, environ: dict[str, str] | None = None) -> Resolution:
    environ = environ or {}
    return resolve(parse(shlex.split(line), environ, LAUNCH_OPTIONS), environ, PROBES)


def options(line: str, **environ: str) -> RunOptions:
    """As `holdfast run` would (--use-env)."""
    return resolution("--use-env " + line, environ).options


FIELDS: list[tuple[str, dict[str, str], dict[str, object]]] = [
    # nodes and rendezvous
    ("train.py", {}, {"standalone": True, "job.backend": "c10d", "endpoint": "localhost:0", "node_rank": None}),
    ("train.py", {}, {"job.min_nodes": 1, "job.max_nodes": 1, "job.fixed_ranks": False, "job.max_restarts": 0}),
    ("--standalone --nnodes 1:4 train.py", {}, {"job.max_nodes": 1, "standalone": True}),
    ("--rdzv-id mine train.py", {}, {"job.run_id": "mine", "standalone": True}),
    ("--standalone --rdzv-id mine train.py", {}, {"job.run_id": "mine"}),
    ("train.py", {"PET_RDZV_ID": "mine"}, {"job.run_id": "mine"}),
    ("--nnodes 2 train.py", {}, {"job.backend": "static", "job.run_id": "none", "endpoint": "127.0.0.1:29500"}),
    ("--nnodes 2 train.py", {}, {"job.fixed_ranks": True, "node_rank": 0, "limits.join_s": 900.0}),
    ("--nnodes 1:3 --node-rank 2 train.py", {}, {"job.min_nodes": 3, "job.max_nodes": 3, "node_rank": 2}),
    ("--master-port 29777 train.py", {}, {"job.backend": "static", "standalone": False, "endpoint": "127.0.0.1:29777"}),
    ("train.py", {"PET_MASTER_PORT": "1"}, {"job.backend": "static", "endpoint": "127.0.0.1:1"}),
    ("--nnodes 2 --master-addr h --master-port 5 train.py", {}, {"endpoint": "h:5"}),
    ("--nnodes 2 --master-addr ::1 train.py", {}, {"endpoint": "[::1]:29500"}),
    ("--nnodes 2 --master-addr [::1] train.py", {}, {"endpoint": "[::1]:29500"}),
    (
        "--nnodes 1 --rdzv-endpoint h:7 train.py",
        {},
        {"job.backend": "static", "endpoint": "h:7", "job.fixed_ranks": True},
    ),
    ("--rdzv-backend c10d train.py", {}, {"endpoint": "localhost:29400", "standalone": False, "job.run_id": "none"}),
    ("--rdzv-backend c10d --rdzv-endpoint h --nnodes 2 train.py", {}, {"endpoint": "h:29400", "limits.join_s": 600.0}),
    ("--rdzv-backend c10d --rdzv-endpoint localhost:0 train.py", {}, {"endpoint": "localhost:0", "succession": False}),
    ("--rdzv-backend c10d --nnodes 2 train.py", {"HOLDFAST_AGENT_PORT": "7"}, {"agent_port": 7, "succession": True}),
    ("--rdzv-backend c10d --nnodes 2 --rdzv-conf succession=off train.py", {}, {"succession": False}),
    (
        "--rdzv-backend c10d --nnodes 2 train.py",
        {"PET_RDZV_ENDPOINT": "a,b:2,[::1]:3"},
        {"endpoint": "a:29400", "meeting_point": "a:29400,b:2,[::1]:3"},
    ),
    ("--rdzv-backend c10d --nnodes 1:4 --node-rank 3 train.py", {}, {"node_rank": 3, "job.fixed_ranks": False}),
    ("--rdzv-backend c10d --nnodes 4 train.py", {"PET_NODE_RANK": "0"}, {"node_rank": 0}),
    ("--rdzv-backend c10d --rdzv-conf join_timeout=7,last_call_timeout=3 train.py", {}, {"limits.join_s": 7.0}),
    ("--rdzv-backend c10d --rdzv-conf is_host=yes train.py", {}, {"is_host": True}),
    ("--rdzv-backend c10d --rdzv-conf is_host=0 train.py", {}, {"is_host": False}),
    ("--nnodes 2 --rdzv-conf timeout=5 train.py", {}, {"limits.join_s": 5.0, "is_host": None}),
    ("--rdzv-conf token_file=secret train.py", {"HOLDFAST_TOKEN": "other"}, {"token": b"s3cret"}),
    ("train.py", {"HOLDFAST_TOKEN": "word\n"}, {"token": b"word"}),
    ("train.py", {}, {"token": None, "local_addr": None, "role": "default", "is_host": None}),
    ("--local-addr 10.0.0.1 --role r train.py", {}, {"local_addr": "10.0.0.1", "role": "r"}),
    # workers
    ("--nproc-per-node 3 train.py", {}, {"nproc": 3, "omp_num_threads": 2}),
    ("--nproc-per-node 8 train.py", {}, {"nproc": 8, "omp_num_threads": 1}),
    ("--nproc-per-node 60 train.py", {}, {"omp_num_threads": 1, "compile_threads": 1}),
    ("train.py", {}, {"compile_threads": None}),
    ("--nproc-per-node 2 train.py", {}, {"compile_threads": 4}),
    ("--nproc-per-node 2 train.py", {"OMP_NUM_THREADS": "9"}, {"compile_threads": 4}),
    ("--nproc-per-node 2 train.py", {"TORCHINDUCTOR_COMPILE_THREADS": "9"}, {"compile_threads": None}),
    ("--nproc-per-node gpu train.py", {}, {"nproc": 2}),
    ("--nproc-per-node auto train.py", {"CUDA_VISIBLE_DEVICES": "1"}, {"nproc": 1, "omp_num_threads": None}),
    ("--nproc-per-node cpu train.py", {}, {"nproc": 8}),
    ("--nproc-per-node xpu train.py", {}, {"nproc": 3}),
    ("--nproc-per-node 4 train.py", {"OMP_NUM_THREADS": "5"}, {"omp_num_threads": None}),
    ("train.py", {"PET_NPROC_PER_NODE": "2"}, {"nproc": 2}),
    ("--max-restarts 3 train.py", {}, {"job.max_restarts": 3}),
    ("train.py", {}, {"job.survive": Survive.SHRINK, "job.min_ranks": 1}),
    ("--survive wait --min-ranks 3 train.py", {}, {"job.survive": Survive.WAIT, "job.min_ranks": 3}),
    ("train.py", {"HOLDFAST_SURVIVE": "off", "PET_MIN_RANKS": "2"}, {"job.survive": Survive.OFF, "job.min_ranks": 2}),
    ("--monitor-interval 2 --start-method fork train.py", {}, {"monitor_interval_s": 2.0, "start_method": "fork"}),
    ("--event-log-handler console --logs-specs default train.py", {}, {"event_log_handler": "console"}),
    ("--virtual-local-rank --nproc-per-node 2 train.py", {"CUDA_VISIBLE_DEVICES": "3,4"}, {"virtual_local_rank": True}),
    ("--numa-binding core-complex train.py", {}, {"numa_binding": "core-complex"}),
    ("train.py", {"PET_NUMA_BINDING": "node"}, {"numa_binding": "node"}),
    ("train.py", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, {"share_store": False}),
    ("train.py", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}, {"share_store": True}),
    # the end
    ("train.py", {}, {"limits.stop_grace_s": 30.0, "signals": (15, 2, 1, 3)}),
    ("train.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}, {"limits.stop_grace_s": 9.0}),
    ("train.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9", "PET_SHUTDOWN_TIMEOUT": "8"}, {"limits.stop_grace_s": 8.0}),
    ("--shutdown-timeout 0 train.py", {"PET_SHUTDOWN_TIMEOUT": "8"}, {"limits.stop_grace_s": 0.0}),
    (
        "--signals-to-handle ' SIGUSR1 ,SIGTERM' train.py",
        {},
        {"signals": (10, 15), "signals_text": " SIGUSR1 ,SIGTERM"},
    ),
    ("--signals-to-handle '' train.py", {}, {"signals": (), "signals_text": ""}),
    # logs
    ("--log-dir /dev/null train.py", {}, {"logs.log_dir": None}),
    ("--ranks-filter 0,8-9 train.py", {}, {"logs.ranks_filter": frozenset({0, 8, 9})}),
    ("--local-ranks-filter 0 train.py", {}, {"logs.local_ranks_filter": frozenset({0})}),
    ("train.py", {}, {"logs.ranks_filter": None, "logs.local_ranks_filter": None, "logs.prefix_template": None}),
    ("-t 1 --duplicate-stdout-filters a,,b,c train.py", {}, {"logs.duplicate_stdout_filters": ("a,b", "c")}),
    ("--duplicate-stderr-filters '' train.py", {}, {"logs.duplicate_stderr_filters": ()}),
    ("train.py", {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}"}, {"logs.prefix_template": "${rank}"}),
    ("train.py", {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": ""}, {"logs.prefix_template": None}),
    # the program
    ("train.py a --lr 3", {}, {"command.kind": CommandKind.SCRIPT, "command.args": ("a", "--lr", "3")}),
    ("train.py", {}, {"command.python": sys.executable, "command.local_rank_argument": False}),
    ("train.py", {"PYTHON_EXEC": "/bin/sh"}, {"command.python": "/bin/sh"}),
    ("train.py", {"PYTHON_EXEC": ""}, {"command.python": sys.executable}),
    ("package", {}, {"command.kind": CommandKind.SCRIPT, "command.target": "package"}),
    ("-m package.no.such x", {}, {"command.kind": CommandKind.MODULE, "command.target": "package.no.such"}),
    ("--no-python ./prog -c", {}, {"command.kind": CommandKind.PROGRAM, "command.args": ("-c",), "command.python": ""}),
    (
        "--no-python sh -c true",
        {"PATH": "/bin:/usr/bin"},
        {"command.kind": CommandKind.PROGRAM, "command.target": "sh"},
    ),
    ("--run-path train.py", {}, {"command.kind": CommandKind.RUN_PATH}),
    ("'s_${local_rank}.py'", {}, {"command.target": "s_${local_rank}.py"}),
]


@pytest.mark.parametrize(
    ("line", "missing"),
    [("--nnodes 2 train.py", "--master-addr"), ("--rdzv-backend c10d --nnodes 2 train.py", "--rdzv-endpoint")],
)
def test_several_nodes_without_a_meeting_point_are_told_where_they_meet(line: str, missing: str) -> None:
    notices = options(line).notices
    assert [notice.partition(":")[0] for notice in notices] == [f"no {missing}"]
    assert "only this machine can reach" in notices[0]
    assert not options("--nnodes 2 --master-addr node0 train.py").notices


@pytest.mark.parametrize(("line", "environ", "fields"), FIELDS)
def test_a_line_resolves(line: str, environ: dict[str, str], fields: dict[str, object]) -> None:
    got = options(line, **environ)
    expected = ("which only this machine can reach", "the job token has")
    told = [notice for notice in got.notices if not any(text in notice for text in expected)]
    assert not told or line.startswith(("--standalone --nnodes 1:4", "--rdzv-backend c10d --nnodes")), told
    for path, expected in fields.items():
        value: object = got
        for name in path.split("."):
            value = getattr(value, name)
        if isinstance(value, Endpoint):
            value = str(value)
        assert value == expected, path


def test_a_standalone_job_gets_a_name_of_its_own() -> None:
    first, second = options("train.py").job.run_id, options("--standalone train.py").job.run_id
    assert uuid.UUID(first) != uuid.UUID(second)


def test_stream_choices() -> None:
    logs = options("-r 2 -t 0:3,12:1 --nproc-per-node 13 train.py").logs
    assert logs.redirects == dict.fromkeys(range(13), Std.ERR)
    assert logs.tee == {0: Std.ALL, 12: Std.OUT}


def test_log_folders(folder: Path) -> None:
    assert options("train.py").logs.log_dir == default_log_dir()
    assert options("--log-dir '' train.py").logs.log_dir == default_log_dir()
    assert options("--log-dir some/where train.py").logs.log_dir == str(folder / "some/where")
    assert not (folder / "some").exists()


def test_launch_gives_the_local_rank_as_an_argument() -> None:
    assert resolution("train.py").options.command.local_rank_argument
    assert not resolution("--use-env train.py").options.command.local_rank_argument


@pytest.mark.parametrize(("line", "environ", "said"), TABLES["notices"])
def test_what_has_no_effect_is_said_in_one_line(line: str, environ: dict[str, str], said: str) -> None:
    notices = options(line, **environ).notices
    assert [notice for notice in notices if said in notice], notices
    assert not any("\n" in notice for notice in notices)


def test_nothing_is_said_of_ordinary_lines() -> None:
    """What schedulers and tutorials write must not be answered with chatter."""
    for line in (
        "--nnodes=1 --node_rank=0 --nproc_per_node=2 train.py",
        "--standalone --nnodes=1 --nproc-per-node=gpu train.py",
        "--standalone --rdzv-backend c10d train.py",
        "--nnodes 2 --nproc_per_node 8 --node_rank 1 --master_addr 10.1.1.1 --master_port 1234 train.py",
        "--nnodes=1:4 --max_restarts=3 --rdzv_id=1 --rdzv_backend=c10d --rdzv_endpoint=h:29400 train.py",
        "--monitor-interval 5 --start-method spawn --log-dir logs -r 3 -t 3 train.py",
    ):
        assert options(line).notices == (), line


def test_the_environment_of_this_process_is_not_touched() -> None:
    before = dict(os.environ)
    options("--nproc-per-node 4 --signals-to-handle SIGUSR1 train.py")
    assert dict(os.environ) == before


def test_the_line_says_the_prefix_of_console_lines_before_the_variables_do() -> None:
    variables = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "old", "PET_LOG_LINE_PREFIX_TEMPLATE": "pet"}
    assert options("--log-line-prefix-template new train.py", **variables).logs.prefix_template == "new"
    assert options("train.py", **variables).logs.prefix_template == "pet"
    assert options("train.py", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="old").logs.prefix_template == "old"


# --- the line that the other nodes of a job have to be started with ---------------------------------------------------


def others(line: str, **environ: str) -> str:
    return run.resolve(parse(shlex.split(line), environ, OPTIONS), environ, "run").how_others_join


@pytest.mark.parametrize(("line", "environ", "expected"), TABLES["pasted"])
def test_it_can_be_pasted(line: str, environ: dict[str, str], expected: str) -> None:
    assert others(line, **environ) == f"on each other node: {expected}"
    parse(shlex.split(expected.replace("RANK", "1"))[2:], {}, OPTIONS)


@pytest.mark.parametrize(("line", "environ", "here", "elsewhere"), TABLES["only_here"])
def test_an_endpoint_that_other_machines_cannot_reach(
    line: str, environ: dict[str, str], here: str, elsewhere: str
) -> None:
    expected = f"In another terminal here: {here}. For nodes on other machines, start all nodes, this one too, with "
    expected += elsewhere.replace("HERE", socket.gethostname())
    assert others(line, **environ).startswith("only this machine can reach ")
    assert others(line, **environ).endswith(expected)


@pytest.mark.parametrize(("line", "environ"), TABLES["typed"])
def test_nobody_has_to_type_it(line: str, environ: dict[str, str]) -> None:
    assert others(line, **environ) == ""


# --- what the table of options says of a value ------------------------------------------------------------------------

PASSED_ON = [option for option in OPTIONS if option.goes_to]
RANGED = [option for option in OPTIONS if option.range]
OTHER_VALUES = {"signals_to_handle": "SIGTERM", "event_log_handler": "console"}


@pytest.mark.parametrize("option", PASSED_ON, ids=lambda option: option.name)
def test_a_value_that_is_passed_on_is_in_its_field(option: Option) -> None:
    other = (option.choices or (OTHER_VALUES.get(option.dest, "7"),))[-1]
    line = option.name if option.kind == FLAG else f"{option.name}={other}"
    for words, value in (
        ("", option.default),
        (line, parse([line, "train.py"], {}, OPTIONS).values.__dict__[option.dest]),
    ):
        found: object = options(f"{words} train.py")
        for name in option.goes_to.split("."):
            found = getattr(found, name)
        assert (found, type(found)) == (value, type(value))
        assert words == "" or found != option.default


@pytest.mark.parametrize("option", RANGED, ids=lambda option: option.name)
def test_a_number_out_of_its_range_is_refused(option: Option) -> None:
    lowest = option.least if option.above is None else option.above
    assert lowest is not None
    bad = [lowest - 1] if option.above is None else [lowest - 1, lowest]
    if option.kind == FLOAT:
        bad += [float("nan"), float("inf")]
    for number in bad:
        text = f"{number:g}"
        with pytest.raises(UsageError, match=f"{option.name} .*: must be {option.range}"):
            options(f"{option.name}={text} train.py")
        with pytest.raises(EnvironmentValueError, match=f"{option.variable}=.*: must be {option.range}"):
            options("train.py", **{option.variable: text})
    options(f"{option.name}={lowest + 1:g} train.py")


def test_only_numbers_have_a_range() -> None:
    assert {option.kind for option in RANGED} <= {INT, FLOAT}


# --- bad input: one message with a code, exit 2, no traceback, nothing started ----------------------------------------


@pytest.mark.parametrize("plan", [True, False], ids=["plan", "run"])
@pytest.mark.parametrize(("line", "environ", "code", "said"), TABLES["refused_lines"])
def test_bad_input_is_one_message_and_exit_2(
    line: str,
    environ: dict[str, str],
    code: str,
    said: str,
    plan: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["run", *(["--plan"] if plan else []), *shlex.split(line)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"holdfast: {code}: ")
    assert said in err
    assert err.count("\n") <= 2
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "required: --bind"),
        ("--bind 127.0.0.1", "names no port"),
        ("--bind 192.0.2.1:29500", "cannot listen at 192.0.2.1:29500: 192.0.2.1 is not an address of this machine"),
        ("--bind nowhere.invalid:29500", "nowhere.invalid does not resolve"),
        ("--bind localhost:TAKEN", "is already bound on this machine"),
        ("--bind localhost:0 --lease soon", "lease=soon: not a number of seconds"),
        ("--bind localhost:0 --token-file nothing_in_it", "the file is empty"),
    ],
)
def test_a_witness_that_cannot_begin(line: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["witness", *line.replace("TAKEN", port).split()]) == 2
    err = capfd.readouterr().err
    assert err.startswith("holdfast: HF1")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "module", "extra"),
    [
        ("--dashboard 0", "uvicorn", "dashboard"),
        ("--metrics 0", "prometheus_client", "metrics"),
        ("--rdzv-backend etcd --rdzv-endpoint h", "etcd3gw", "etcd"),
    ],
)
def test_a_missing_package_is_said_before_anything_starts(
    line: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["run", *line.split(), "train.py"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("holdfast: HF117: --")
    assert err.endswith(f" needs {module}: pip install 'holdfast[{extra}]'\n")
    assert err.count("\n") == 1


def test_what_the_job_survives_is_in_the_plan_alone() -> None:
    assert not options("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h train.py").notices


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--log-dir", "/sub", "train.py"]) == 2
    assert "holdfast: HF108: --log-dir /sub: / is not writable" in capfd.readouterr().err
    (tmp_path / "train.py").chmod(0)
    assert main(["run", "train.py"]) == 2
    assert "cannot be read" in capfd.readouterr().err


@pytest.mark.parametrize("argv", [["x.py"], ["--log-dir", "logs", "-m", "x"]])
def test_a_current_folder_that_is_gone(argv: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert main(["run", *argv]) == 2
    assert "deleted" in capfd.readouterr().err

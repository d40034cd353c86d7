"""Bad input: one message with a code, exit 2, no traceback, nothing started."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from holdfast.cli import main

BAD: list[tuple[str, dict[str, str], str, str]] = [
    # HF101: the line
    ("", {}, "HF101", "no training script given"),
    ("--nnodes 2", {}, "HF101", "no training script given"),
    ("--nproc-per-node train.py", {}, "HF101", "train.py was taken for the value of --nproc-per-node"),
    ("--nnodes", {}, "HF101", "--nnodes needs a value"),
    ("--nprocs 2 train.py", {}, "HF101", "did you mean --nproc-per-node?"),
    ("--nproc 2 train.py", {}, "HF101", "--nproc is ambiguous: it could be --nproc-per-node or --nproc_per_node"),
    ("--standalone=yes train.py", {}, "HF101", "--standalone takes no value"),
    ("--max-restarts two train.py", {}, "HF101", "--max-restarts two: not a whole number"),
    ("--max-restarts -1 train.py", {}, "HF101", "--max-restarts -1: must be 0 or more"),
    ("--monitor-interval 0 train.py", {}, "HF101", "--monitor-interval 0.0: must be a positive number"),
    ("--monitor-interval nan train.py", {}, "HF101", "must be a positive number"),
    ("--start-method thread train.py", {}, "HF101", "must be one of spawn, fork, forkserver"),
    ("--numa-binding cpu train.py", {}, "HF101", "must be one of node, socket, exclusive, core-complex"),
    ("--event-log-handler file train.py", {}, "HF101", "must be one of null, console, dynamic_rendezvous"),
    ("--logs-specs nope train.py", {}, "HF101", "installed: default"),
    ("--signals-to-handle SIGTERM,SIGKILL train.py", {}, "HF101", "SIGKILL cannot be handled"),
    ("--signals-to-handle SIGSTOP train.py", {}, "HF101", "SIGSTOP cannot be handled"),
    ("--shutdown-timeout -1 train.py", {}, "HF101", "--shutdown-timeout -1: must be 0 or more"),
    ("--hang-timeout -1 train.py", {}, "HF101", "--hang-timeout -1.0: must be a number of seconds, 0 for never"),
    ("--hang-timeout nan train.py", {}, "HF101", "must be a number of seconds"),
    ("--hang-timeout inf train.py", {}, "HF101", "must be a number of seconds"),
    ("--rdzv-conf hang_report=0 train.py", {}, "HF106", "must be positive"),
    ("--no-python -m train.py", {}, "HF101", "exclude each other"),
    # HF102: the script
    ("trian.py", {}, "HF102", "does not exist; did you mean train.py?"),
    ("elsewhere/x.py", {}, "HF102", "the training script elsewhere/x.py does not exist"),
    ("--run-path nothing.py", {}, "HF102", "does not exist"),
    ("empty", {}, "HF102", "is a folder without a __main__.py"),
    ("-m train.py", {}, "HF102", "-m takes a module's name and train.py is a file; leave -m out"),
    ("''", {}, "HF102", "name is empty"),
    ("--no-python train.py", {}, "HF102", "not on PATH; write ./train.py"),
    ("--no-python ./train.py", {}, "HF102", "is not executable; chmod +x"),
    ("--no-python ./nothing", {}, "HF102", "does not exist"),
    ("--no-python ./empty", {}, "HF102", "is a folder"),
    ("--no-python no-such-program-anywhere", {}, "HF102", "not on PATH"),
    # HF103: nodes
    ("--nnodes 0 train.py", {}, "HF103", "at least 1 node"),
    ("--nnodes 3:1 train.py", {}, "HF103", "the minimum 3 is above the maximum 1"),
    ("--nnodes two train.py", {}, "HF103", "--nnodes two: must be a number N or a range MIN:MAX"),
    ("--nnodes 1:2:3 train.py", {}, "HF103", "must be N or MIN:MAX"),
    ("--nnodes= train.py", {}, "HF103", "--nnodes '': must be"),
    ("--nnodes -1 train.py", {}, "HF103", "at least 1 node"),
    ("--standalone --nnodes 2 train.py", {}, "HF103", "--standalone is one node by itself"),
    ("--nnodes 2 --node-rank 2 train.py", {}, "HF103", "with 2 nodes ranks are 0 to 1"),
    ("--rdzv-backend c10d --nnodes 1:2 --node-rank -1 train.py", {}, "HF103", "ranks are 0 to 1"),
    # HF104: processes
    ("--nproc-per-node 0 train.py", {}, "HF104", "--nproc-per-node 0: the number of workers must be at least 1"),
    ("--nproc-per-node -3 train.py", {}, "HF104", "at least 1"),
    ("--nproc-per-node gpu train.py", {"CUDA_VISIBLE_DEVICES": ""}, "HF104", "no GPU to use"),
    ("--nproc-per-node AUTO train.py", {}, "HF104", "did you mean auto?"),
    ("--nproc-per-node 1.5 train.py", {}, "HF104", "must be a number, auto"),
    # HF105: endpoint
    ("--rdzv-backend c10d --rdzv-endpoint :29400 train.py", {}, "HF105", "names no host"),
    ("--rdzv-backend c10d --rdzv-endpoint h:99999 train.py", {}, "HF105", "a port is a number from 0 to 65535"),
    ("--rdzv-backend c10d --rdzv-endpoint h:http train.py", {}, "HF105", "port"),
    ("--rdzv-backend c10d --rdzv-endpoint 'a b:1' train.py", {}, "HF105", "neither a name nor an address"),
    ("--rdzv-backend c10d --nnodes 2 --rdzv-endpoint h:0 train.py", {}, "HF105", "port 0 is any free port"),
    ("--rdzv-endpoint host train.py", {}, "HF105", "--master-port"),
    ("--master-port 99999 train.py", {}, "HF105", "--master-port 99999: a port is a number"),
    ("--nnodes 2 --master-port 0 train.py", {}, "HF105", "port 0 is any free port"),
    ("--nnodes 2 --master-addr 'a b' train.py", {}, "HF105", "--master-addr a b"),
    ("--nnodes 2 --master-addr '' train.py", {}, "HF105", "names no host"),
    # HF106: rendezvous
    ("--rdzv-backend c11d train.py", {}, "HF106", "did you mean c10d?"),
    ("--rdzv-conf =1 train.py", {}, "HF106", "must be in the format"),
    ("--rdzv-conf timeout train.py", {}, "HF106", "must have a value"),
    ("--rdzv-backend c10d --rdzv-conf join_timeout=1.5 train.py", {}, "HF106", "not a whole number"),
    ("--rdzv-backend c10d --rdzv-conf is_host=maybe train.py", {}, "HF106", "neither true"),
    ("--rdzv-conf min_nodes=1 train.py", {}, "HF106", "use --nnodes"),
    ("--rdzv-conf token_file=nowhere train.py", {}, "HF106", "token_file=nowhere: No such file"),
    ("--rdzv-conf token_file=nothing_in_it train.py", {}, "HF106", "the file is empty"),
    # HF107: variables
    ("train.py", {"PET_NNODES": "two"}, "HF107", "PET_NNODES=two: must be"),
    ("train.py", {"PET_NPROC_PER_NODE": ""}, "HF107", "PET_NPROC_PER_NODE=: must be a number"),
    ("train.py", {"PET_STANDALONE": "maybe"}, "HF107", "PET_STANDALONE=maybe: a flag is"),
    ("train.py", {"PET_MAX_RESTARTS": "x"}, "HF107", "PET_MAX_RESTARTS=x: not a whole number"),
    ("train.py", {"PET_START_METHOD": "x"}, "HF107", "PET_START_METHOD=x: must be one of"),
    ("train.py", {"PET_RDZV_BACKEND": "x"}, "HF107", "PET_RDZV_BACKEND=x"),
    ("train.py", {"PET_RDZV_CONF": "x"}, "HF107", "PET_RDZV_CONF=x"),
    ("train.py", {"PET_RDZV_ENDPOINT": "h:99999"}, "HF107", "PET_RDZV_ENDPOINT=h:99999"),
    ("train.py", {"PET_REDIRECTS": "9"}, "HF107", "PET_REDIRECTS=9: must be 0"),
    ("train.py", {"PET_LOG_DIR": "train.py"}, "HF107", "is a file, not a folder"),
    ("train.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, "HF107", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon"),
    ("train.py", {"HOLDFAST_TOKEN": ""}, "HF107", "HOLDFAST_TOKEN is empty"),
    (
        "train.py",
        {"PYTHON_EXEC": "/usr/bin/env python"},
        "HF107",
        "PYTHON_EXEC=/usr/bin/env python: no such executable",
    ),
    # HF108: log folder
    ("--log-dir train.py train.py", {}, "HF108", "train.py is a file, not a folder"),
    ("--log-dir train.py/deeper train.py", {}, "HF108", "train.py is a file, not a folder"),
    # HF113: log options
    ("-r 4 train.py", {}, "HF113", "--redirects 4: must be 0 (none)"),
    ("-t 0:4 train.py", {}, "HF113", "--tee 0:4: must be 0 (none)"),
    ("-t 0:1, train.py", {}, "HF113", "--tee 0:1,"),
    ("-r stdout train.py", {}, "HF113", "must be 0 (none)"),
    ("--local-ranks-filter 0,,1 train.py", {}, "HF113", "local ranks separated by commas"),
    ("--local-ranks-filter x train.py", {}, "HF113", "local ranks separated by commas"),
    # HF114: placement
    ("--virtual-local-rank --nproc-per-node 3 train.py", {"CUDA_VISIBLE_DEVICES": "0,1"}, "HF114", "names 2"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "nothing_in_it").write_text("\n")
    (tmp_path / "empty").mkdir()


@pytest.mark.parametrize("plan", [True, False], ids=["plan", "run"])
@pytest.mark.parametrize(("line", "environ", "code", "said"), BAD)
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--log-dir", "/sub", "train.py"]) == 2
    assert "holdfast: HF108: --log-dir /sub: / cannot be written" in capfd.readouterr().err
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

"""`--plan`: complete, deterministic, and nothing is started."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.cli.devices import Probes
from holdfast.cli.grammar import parse
from holdfast.cli.option_table import OPTIONS
from holdfast.cli.plan import HEAD, render
from holdfast.cli.resolve import resolve
from tests.support.documents import checked
from tests.support.tables import tables


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def plan(line: str, **environ: str) -> str:
    parsed = parse(["--plan", *shlex.split(line)], environ, OPTIONS)
    return render(parsed, resolve(parsed, environ, Probes(nvml=lambda: ["a", "b"], cpus=6)), environ)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a,w:9 --nnodes 2", "if a witness is at w:9: 2 of 3 voters elect another; it trains when 2 are here"),
        ("a --nnodes 3 --rdzv-conf succession=off", "succession is off"),
        (
            "a --nnodes 3",
            "1 of 3 nodes at one time, the coordinator's too: 2 of 3 voters elect another; it trains when 3 are here",
        ),
        ("a --nnodes 1:100", "3 of 100 nodes"),
    ],
)
def test_the_plan_states_what_the_job_survives_and_why(line: str, said: str) -> None:
    assert said in survived(f"--rdzv-backend c10d --rdzv-endpoint {line} train.py")


def test_the_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["run", "--plan", "--json", "--nproc-per-node", "2", "--max-restarts", "0", "train.py", "--lr", "1"]) == 0
    )
    told = checked("run", capsys.readouterr().out)
    assert told["not_default"] == "--nproc-per-node 2"
    assert told["environment"]["WORLD_SIZE"] == "2"
    assert [worker["environment"]["LOCAL_RANK"] for worker in told["workers"]] == ["0", "1"]
    assert told["workers"][1]["command"].endswith("train.py --lr 1")
    given = {option["name"]: option for option in told["options"]}
    assert given["--max-restarts"] == {"name": "--max-restarts", "value": "0", "source": "command line"}
    assert given["--grow"]["source"] == "default"


def test_an_error_of_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plan", "--json", "--nnodes", "two", "train.py"]) == 2
    assert checked("run", capsys.readouterr().out)["error"]["code"] == "HF103"
    assert main(["run", "--json", "train.py"]) == 2
    assert "--json is for --plan" in capsys.readouterr().err


def test_json_behind_the_script_is_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plan", "train.py", "--json"]) == 0
    assert capsys.readouterr().out.startswith("holdfast would run this")


def survived(line: str) -> str:
    (told,) = [row for row in plan(line).splitlines() if row.startswith("survives ")]
    return told.removeprefix("survives").strip()


@pytest.mark.parametrize(("nodes", "others", "said"), tables(__file__)["survives"])
def test_how_many_losses_a_job_survives(nodes: int, others: int, said: str) -> None:
    places = ",".join(("a", "v:8", "w:9")[: 1 + others])
    fixed = "any node but the coordinator's: with static rendezvous the others wait for it"
    elsewhere = "any node, the coordinator's too: another one is elected through etcd"
    for options, why in (
        (f"--rdzv-backend c10d --rdzv-endpoint {places} --nnodes 1:{nodes}", said),
        (f"--rdzv-backend static --rdzv-endpoint a:9 --nnodes {nodes}", fixed),
        (f"--rdzv-backend etcd --rdzv-endpoint a:9 --nnodes 1:{nodes}", elsewhere),
    ):
        assert survived(f"{options} train.py") == f"the loss of {why}"


@pytest.mark.parametrize("options", ["--standalone", "--rdzv-backend c10d --rdzv-endpoint a", "--rdzv-backend etcd"])
def test_one_node_survives_no_loss(options: str) -> None:
    assert survived(f"{options} --nnodes 1 train.py") == "the loss of no node: it has one"


@pytest.mark.parametrize(
    ("line", "environ", "said"),
    [
        ("--hang-timeout 20 train.py", {}, "restart if none changes for 20 s"),
        ("--hang-timeout 0 train.py", {}, "no restart"),
        ("train.py", {"HOLDFAST_HANG_TIMEOUT": "7"}, "none changes for 7 s"),
        ("train.py", {"PET_HANG_TIMEOUT": "8"}, "none changes for 8 s"),
        ("--rdzv-backend c10d --rdzv-endpoint h --rdzv-conf hang_report=5 train.py", {}, "no step for 5 s and"),
    ],
)
def test_what_is_done_about_hangs(line: str, environ: dict[str, str], said: str) -> None:
    (told,) = [row for row in plan(line, **environ).splitlines() if row.startswith("hang ")]
    assert said in told


def test_the_folder_that_fills_an_empty_one_is_shown_with_its_limits() -> None:
    text = plan("--cache-dir /local/k --cache-from /shared/k train.py")
    assert "kept in /local/k, 10 GiB at most; an empty one is filled from /shared/k, 2 GiB in 15 s at most" in text


def test_the_whole_plan_of_a_static_node(tmp_path: Path) -> None:
    text, _, _ = plan(
        "--nnode 2 --node-rank 1 --nproc-per-node 2 --master-addr h --log-dir /l --role r --cache-dir off train.py '$local_rank'"
    ).partition(f"\n\n{HEAD}\n")
    assert (
        text
        == f"""\
holdfast would run this; nothing was started.

not default   --nnodes 2, --nproc-per-node 2, --node-rank 1, --role r, --master-addr h, --log-dir /l
job           id none, up to 0 restarts after worker failures
nodes         2; this one is node 1
rendezvous    static at h:29500, waits 900 s for 2
coordinator   the agent on the machine that owns h
survives      the loss of any node but the coordinator's: with static rendezvous the others wait for it
token         none
workers here  2
threads       OMP_NUM_THREADS=3: 6 CPUs for 2 workers
compilers     TORCHINDUCTOR_COMPILE_THREADS=3: processes of torch.compile for each worker
caches        off: each library keeps compiled kernels in its own place
preload       none (train.py imports nothing that is built on torch)
standby       none
stop          on SIGTERM, SIGINT, SIGHUP, SIGQUIT: SIGTERM to the workers, SIGKILL after 30 s
drain         scripts that call should_stop() go to their next safe point within 60 s, on any of these except SIGINT and SIGQUIT
hang          no step for 12 s and 20 steps (at most 300 s): all stacks are sampled; restart if none changes for 300 s
time-outs     fence 4 s, lease 6 s, hang 312 s, process group 1800 s
logs          /l/none_<random>/attempt_0/<local rank>/
notice        --nnode taken as --nnodes

variables of every worker here
  GROUP_RANK=1
  GROUP_WORLD_SIZE=2
  HOLDFAST_JOB_UID=<assigned>
  LOCAL_WORLD_SIZE=2
  MASTER_ADDR=<assigned>
  MASTER_PORT=<assigned>
  NODE_RANK=1
  OMP_NUM_THREADS=3
  ROLE_NAME=r
  ROLE_WORLD_SIZE=<assigned>
  TORCHELASTIC_MAX_RESTARTS=0
  TORCHELASTIC_RESTART_COUNT=0
  TORCHELASTIC_RUN_ID=none
  TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT
  TORCHELASTIC_USE_AGENT_STORE=True
  TORCHINDUCTOR_COMPILE_THREADS=3
  TORCH_NCCL_ASYNC_ERROR_HANDLING=1
  WORLD_SIZE=<assigned>

local rank 0
  {sys.executable} -u train.py 0
  LOCAL_RANK=0
  RANK=<assigned>
  ROLE_RANK=<assigned>
  TORCHELASTIC_ERROR_FILE=/l/none_<random>/attempt_0/0/error.json

local rank 1
  {sys.executable} -u train.py 1
  LOCAL_RANK=1
  RANK=<assigned>
  ROLE_RANK=<assigned>
  TORCHELASTIC_ERROR_FILE=/l/none_<random>/attempt_0/1/error.json"""
    )


PARTS = [
    ("train.py", {}, ["id <random>", "nodes         1, this one", "standalone", "coordinator   this agent"]),
    ("train.py", {}, ["  WORLD_SIZE=1", "  RANK=0", "OMP_NUM_THREADS stays unset"]),
    ("--rdzv-id x train.py", {}, ["id x,", "TORCHELASTIC_RUN_ID=x"]),
    (
        "--rdzv-backend c10d --rdzv-endpoint h --nnodes 1:4 --node-rank 3 train.py",
        {},
        ["1 to 4; this one is node 3 if"],
    ),
    (
        "--rdzv-backend c10d --rdzv-endpoint h --nnodes 1:4 train.py",
        {},
        ["GROUP_WORLD_SIZE=<assigned>", "c10d at h:29400"],
    ),
    (
        "--rdzv-backend c10d --rdzv-conf is_host=0,join_timeout=5 train.py",
        {},
        ["another agent, by is_host", "waits 5 s"],
    ),
    ("--nproc-per-node auto train.py", {}, ["workers here  2, one per gpu (NVML)"]),
    ("--nproc-per-node gpu train.py", {"CUDA_VISIBLE_DEVICES": "1"}, ["1, one per gpu (1 of 2 by NVML and CUDA"]),
    ("--nproc-per-node 2 train.py", {"OMP_NUM_THREADS": "9"}, ["OMP_NUM_THREADS=9, already set"]),
    (
        "--virtual-local-rank --nproc-per-node 2 train.py",
        {"HIP_VISIBLE_DEVICES": "4,6"},
        ["  HIP_VISIBLE_DEVICES=4", "  HIP_VISIBLE_DEVICES=6"],
    ),
    ("--virtual-local-rank --nproc-per-node 2 train.py", {}, ["  CUDA_VISIBLE_DEVICES=0", "  CUDA_VISIBLE_DEVICES=1"]),
    ("--log-dir /dev/null train.py", {}, ["logs          no files", "TORCHELASTIC_ERROR_FILE=\n"]),
    ("train.py", {"HOLDFAST_TOKEN": "hush"}, ["token         yes"]),
    ("-m train.mod a", {}, ["-u -m train.mod a\n"]),
    ("--no-python sh -c 'a b'", {"PATH": "/bin"}, ["  sh -c 'a b'\n"]),
    ("--signals-to-handle '' --shutdown-timeout 3 train.py", {}, ["on no signal", "SIGKILL after 3 s"]),
]


@pytest.mark.parametrize(("line", "environ", "parts"), PARTS)
def test_what_a_plan_says(line: str, environ: dict[str, str], parts: list[str]) -> None:
    text = plan(line, **environ) + "\n"
    assert plan(line, **environ) + "\n" == text
    assert all(part in text for part in parts), text
    assert "hush" not in text


def test_a_script_whose_name_is_not_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"caf\xe9.py")
    (tmp_path / name).touch()
    assert main(["run", "--plan", name]) == 0
    assert "caf\ufffd.py" in capsys.readouterr().out


def test_the_plan_ends_with_the_options_that_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*options: str) -> list[str]:
        assert main(["run", "--plan", *options, "train.py"]) == 0
        return capsys.readouterr().out.splitlines()

    end = planned("--grow", "now", "--nproc-per-node", "2")[-4:]
    assert end[0] == "options, their values and sources"
    assert [line.split() for line in end[1:3]] == [
        ["--nproc-per-node", "2", "command", "line"],
        ["--grow", "now", "command", "line"],
    ]
    assert end[3].endswith("other options have their defaults; --plan --json lists them")
    assert "default" not in "".join(line for line in planned() if line.startswith("  --"))

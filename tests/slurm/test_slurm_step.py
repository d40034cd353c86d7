"""What a step says, and what of it a command line leaves to it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.cli.grammar import FROM_STEP, Parsed, parse
from holdfast.cli.option_table import OPTIONS
from holdfast.cli.plan import render
from holdfast.cli.resolve import resolve
from holdfast.cli.under_slurm import complete, srun_environment, srun_line
from holdfast.launchers.slurm import ScontrolOutput, SlurmStep, expand, over, read_step, tasks_per_node
from holdfast.protocol.errors import EnvironmentValueError, NodesError, UsageError
from tests.support.tables import tables

TABLES = tables(__file__)

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NODELIST": "n[1-3]",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_CPUS_ON_NODE": "4",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
}


def taken(line: str, **more: str) -> Parsed:
    environ = {**STEP, **more}
    return complete(parse(shlex.split(line), environ, OPTIONS), environ, address=lambda host: host)[0]


def differing(line: str, **more: str) -> dict[str, object]:
    parsed = taken(line, **more)
    return {dest: getattr(parsed.values, dest) for dest, source in parsed.sources.items() if source == FROM_STEP}


def test_a_batch_script_is_no_step() -> None:
    assert read_step(BATCH) is None
    assert read_step({}) is None


@pytest.mark.parametrize("step_id", ["4294967291", "4294967290", "4294967292"])
def test_an_interactive_shell_is_no_step(step_id: str) -> None:
    assert read_step({**STEP, "SLURM_STEP_ID": step_id}) is None


@pytest.mark.parametrize(("title", "is_step"), TABLES["steps_of_others"])
def test_the_step_of_whoever_submitted_the_job_does_not_count(title: str, is_step: bool) -> None:
    assert (read_step({**STEP, "SLURM_TASK_PID": "1"}, lambda _pid: title) is not None) == is_step
    parts = {"SLURM_HET_SIZE": "2", "SLURM_TASK_PID": "1"}
    assert read_step({**STEP, **parts}, lambda _pid: "slurmstepd: [8.1]") is not None


def test_the_steps_own_names_count() -> None:
    step = read_step({**STEP, "SLURM_RESTART_COUNT": "2", "SLURM_ARRAY_TASK_ID": "5", "SLURM_GPUS_ON_NODE": "8"})
    assert step is not None
    assert (step.nodes, step.node_rank, step.restarts) == (("n1", "n2"), 1, 2)
    assert (step.cpus, step.gpus, step.run_id) == (4, 8, "7_1_5")


def test_all_of_a_line_comes_from_the_step() -> None:
    found = differing("train.py")
    port = str(found["rdzv_endpoint"]).removeprefix("n1:")
    assert 20_000 <= int(port) < 32_000
    assert {name: value for name, value in found.items() if name != "rdzv_endpoint"} == {
        "nnodes": "2",
        "node_rank": 1,
        "rdzv_backend": "c10d",
        "rdzv_conf": "is_host=0",
        "rdzv_id": "7_1",
    }
    assert "is_host=1" in str(differing("train.py", SLURM_NODEID="0")["rdzv_conf"])


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("--nnodes 1:2 train.py", {"node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"}),
        ("--rdzv-id x train.py", {"nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_conf"}),
        ("--rdzv-backend static train.py", {"nnodes", "node_rank", "rdzv_endpoint", "rdzv_id"}),
        ("--standalone train.py", set()),
        ("--nnodes 1 train.py", set()),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:1 train.py", {"node_rank", "rdzv_id"}),
        ("--nnodes 2 --master-addr h --node-rank 1 train.py", {"rdzv_id"}),
        ("--rdzv-backend etcd --rdzv-endpoint h:1 train.py", {"nnodes", "node_rank", "rdzv_id"}),
        ("--nnodes 1:2 --rdzv-backend etcd --rdzv-endpoint h:1 train.py", {"node_rank", "rdzv_id"}),
        ("--nnodes 3 --rdzv-endpoint h:1 train.py", set()),  # with the nodes of another step
    ],
)
def test_what_is_said_wins(line: str, left: set[str]) -> None:
    assert set(differing(line)) == left


def test_a_variable_is_said_too() -> None:
    assert "rdzv_id" not in differing("train.py", PET_RDZV_ID="x")


def test_a_setting_of_the_rendezvous_stays() -> None:
    assert taken("--rdzv-conf join_timeout=9 train.py").values.rdzv_conf == "join_timeout=9,is_host=0"
    assert taken("--rdzv-conf is_host=1 train.py").values.rdzv_conf == "is_host=1"


def test_one_node_meets_nobody_but_keeps_its_name() -> None:
    more = {"SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    assert differing("train.py", **more, SLURM_STEP_TASKS_PER_NODE="1") == {"rdzv_id": "7_1"}


def test_workers_by_gpus_unless_said() -> None:
    assert differing("train.py", SLURM_GPUS_ON_NODE="2")["nproc_per_node"] == "2"
    assert "nproc_per_node" not in differing("--nproc-per-node 1 train.py", SLURM_GPUS_ON_NODE="2")


@pytest.mark.parametrize("line", ["train.py", "--rdzv-backend etcd --rdzv-endpoint h:1 train.py"])
def test_two_agents_on_a_node_are_refused_once(line: str) -> None:
    with pytest.raises(NodesError, match=r"2 tasks on n2.*--ntasks-per-node=1"):
        taken(line, SLURM_STEP_TASKS_PER_NODE="1,2")
    with pytest.raises(SystemExit) as quiet:
        taken(line, SLURM_STEP_TASKS_PER_NODE="1,2", SLURM_PROCID="2")
    assert quiet.value.code == NodesError.exit_code


@pytest.mark.parametrize("line", ["--standalone train.py", "--nnodes 3 --rdzv-endpoint h:1 train.py"])
def test_several_agents_on_a_node_are_as_the_line_says(line: str) -> None:
    assert taken(line, SLURM_STEP_TASKS_PER_NODE="1,2").values.training_script == "train.py"


def test_slurms_signal_is_a_notice_unless_said() -> None:
    assert differing("--slurm train.py")["preempt_signal"] == "USR1"
    assert "preempt_signal" not in differing("--slurm --preempt-signal USR2 train.py")
    assert "preempt_signal" not in differing("train.py")


@pytest.mark.parametrize("more", TABLES["contradictions"])
def test_a_step_that_contradicts_itself_is_refused(more: dict[str, str]) -> None:
    with pytest.raises(EnvironmentValueError):
        read_step({**STEP, **more})


def test_tasks_per_node() -> None:
    assert tasks_per_node("2(x3),1,4(x1)") == (2, 2, 2, 1, 4)


def made(job_id: int, step_id: int = 0, restarts: int = 0) -> SlurmStep:
    return SlurmStep(job_id, step_id, ("a", "b"), 0, (1, 1), restarts)


def test_neighbours_have_ports_of_their_own() -> None:
    """Array tasks are jobs with consecutive ids; steps and restarts are told apart as well."""
    places = [made(job, step, restart) for job in range(5000, 5200) for step in range(4) for restart in range(3)]
    assert len({step.port for step in places}) == len(places)
    assert len({made(job).port for job in range(100_000, 112_000)}) == 12_000
    assert all(20_000 <= step.port < 32_000 for step in places)


def test_the_plan_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    parsed = taken("--plan --nproc-per-node 2 train.py", SLURM_RESTART_COUNT="3", SLURM_CPUS_ON_NODE="1")
    resolution = resolve(parsed, STEP)
    text = render(parsed, resolution, STEP)
    assert "from the Slurm step: --nnodes 2, --node-rank 1, --rdzv-backend c10d" in text
    assert "restart 3" in text
    assert "OMP_NUM_THREADS=1: 1 CPUs for 2 workers" in text
    assert (resolution.options.job.run_id, resolution.options.job.requeues) == ("7_1", 3)
    assert resolution.options.is_host is False


def test_slurm_in_a_batch_script_is_one_srun() -> None:
    words = srun_line(BATCH, "run", ["--slurm", "train.py", "a,b"])
    assert words[:7] == [
        *["srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"],
        *["--kill-on-bad-exit=0", "--no-kill", "--wait=0"],
    ]
    assert words[8:] == ["-m", "holdfast", "run", "--slurm", "train.py", "a,b"]


def test_each_component_of_a_heterogeneous_job_has_its_agents() -> None:
    sizes = {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2"}
    job = {**BATCH, **sizes, "SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "7"}
    assert ":" not in srun_line({**job, "SLURM_JOB_ID_HET_GROUP_0": "6"}, "run", ["train.py"]), "the submitter's"
    words = srun_line(job, "run", ["--slurm", "train.py"])
    first, second = words[1 : words.index(":")], words[words.index(":") + 1 :]
    assert first[:3] == ["--het-group=0", "--nodes=1", "--ntasks=1"]
    assert second[:3] == ["--het-group=1", "--nodes=2", "--ntasks=2"]
    assert first[3:] == second[3:]


def test_a_colon_of_the_scripts_is_not_sruns() -> None:
    """Alone it would begin the line of another component."""
    words = srun_line(BATCH, "run", ["--slurm", "train.py", ":", "b c"])
    assert ":" not in words
    assert words[-3:-1] == ["sh", "-c"]
    assert shlex.split(words[-1])[-3:] == ["train.py", ":", "b c"]


def test_slurm_outside_of_a_job_is_refused() -> None:
    with pytest.raises(UsageError, match="holdfast submit --slurm"):
        srun_line({}, "run", ["--slurm", "train.py"])


def test_the_token_is_inherited_and_everything_else_too() -> None:
    parsed = parse(["--slurm", "train.py"], {}, OPTIONS)
    given = {"A": "x,y", "SLURM_EXPORT_ENV": "NONE"}
    first, second = srun_environment(parsed, given), srun_environment(parsed, given)
    assert len(first["HOLDFAST_TOKEN"]) == 64
    assert first["HOLDFAST_TOKEN"] != second["HOLDFAST_TOKEN"]
    assert (first["A"], first["SLURM_EXPORT_ENV"]) == ("x,y", "ALL")
    assert srun_environment(parsed, {"HOLDFAST_TOKEN": "mine"})["HOLDFAST_TOKEN"] == "mine"
    own = parse(["--slurm", "--rdzv-conf", "token_file=/t", "train.py"], {}, OPTIONS)
    assert "HOLDFAST_TOKEN" not in srun_environment(own, {})


@pytest.mark.parametrize(("text", "failed", "said"), TABLES["lives"])
def test_when_a_life_is_over(text: str, failed: bool, said: str) -> None:
    reason = over(ScontrolOutput(text, failed), 1, 1)
    assert said in reason
    assert bool(reason) == bool(said)


# --- slurm's lists of hosts: ours against `scontrol show hostnames`, where there is one -------------------------------


@pytest.mark.parametrize("text", TABLES["scontrol_lists"])
def test_it_says_what_scontrol_says(text: str, tmp_path: Path) -> None:
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed: apt-get install slurm-client")
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    line = ["scontrol", "show", "hostnames", text]
    done = subprocess.run(
        line,
        env={"PATH": "/usr/bin:/bin", "SLURM_CONF": str(tmp_path / "slurm.conf")},
        capture_output=True,
        check=True,
    )
    assert list(expand(text)) == done.stdout.decode().split()


@pytest.mark.parametrize(("text", "hosts"), TABLES["node_lists"])
def test_lists(text: str, hosts: str) -> None:
    assert " ".join(expand(text)) == hosts


@pytest.mark.parametrize("text", TABLES["no_lists"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(EnvironmentValueError):
        expand(text)


def test_with_a_topology_the_coordinator_orders_the_nodes() -> None:
    topology = {"SLURM_TOPOLOGY_ADDR": "core.leaf2.n2", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    parsed = taken("train.py", **topology)
    assert parsed.switches == ("core", "leaf2")
    assert not parsed.given("node_rank")
    block = {"SLURM_TOPOLOGY_ADDR": "b02.n2.example.org", "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}
    assert taken("train.py", **block).switches == ("b02",), "topology/block: as its plugin of Slurm 25 writes it"
    static = taken("--rdzv-backend static train.py", **topology)
    assert (static.given("node_rank"), static.values.node_rank) == (True, 1), "it has no order of its own"
    flat = {"SLURM_TOPOLOGY_ADDR": "n2.example.org", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    assert taken("train.py", **flat).switches == ()

"""One node's checks on facts that are made up: what is well passes, and each trouble has its code, level and fix."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core.doctor import DoctorFinding, Folder, Gpu, Interface, Level, LocalFacts, TorchFacts, TorchState
from holdfast.insight.doctor.findings import as_json, code_texts, exit_code, lines_of, render, worst
from holdfast.insight.doctor.local import chosen, examine, proposed, slow_import

GIB = 2**30
ETH0 = Interface(name="eth0", addresses=("10.0.0.7",))
LO = Interface(name="lo", addresses=("127.0.0.1", "::1"))
DOCKER0 = Interface(name="docker0", addresses=("172.17.0.1",))
GPU = Gpu(index=0, name="H200", driver="570.86", memory_total_mib=140000, memory_used_mib=4, ecc_errors=0)
TORCH = TorchFacts(
    state=TorchState.OK, version="2.13.0", cuda="12.6", nccl="2.27.3", distributed=True, gloo=True, gpus=1, seconds=2.0
)
WELL = LocalFacts(
    host="node7",
    python="3.11.7",
    holdfast="0.1.0",
    nproc=2,
    nodes=2,
    torch=TORCH,
    driver="570.86",
    gpus=(GPU,),
    shm=Folder(path="/dev/shm", total_bytes=64 * GIB, free_bytes=60 * GIB),
    folders=(Folder(path="/logs", total_bytes=100 * GIB, free_bytes=90 * GIB),),
    limits={"nofile": 65536, "nproc": None, "memlock": None, "core": 0},
    infiniband=("mlx5_0",),
    memory_bytes=512 * GIB,
    memory_available_bytes=400 * GIB,
    cpus=64,
    cpus_allowed=64,
    ptrace_scope=1,
    clock_synchronised=True,
    own_addresses=("10.0.0.7",),
    interfaces=(LO, ETH0),
    default_interface="eth0",
    ephemeral_ports=(32768, 60999),
    endpoint="node7:29400",
    endpoint_port=29400,
    endpoint_is_here=True,
)


def found(**changes: Any) -> dict[str, tuple[Level, str]]:
    """Codes of what is not well, with level and text."""
    findings = examine(replace(WELL, **changes))
    return {each.code: (each.level, each.why) for each in findings if each.level is not Level.PASS}


def torch(**changes: Any) -> dict[str, Any]:
    return {"torch": replace(TORCH, **changes)}


def test_a_node_on_which_all_is_well_passes_every_check() -> None:
    findings = examine(WELL)
    assert [each for each in findings if each.level is not Level.PASS] == []
    assert len(findings) > 20
    assert worst(findings).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "code", "level", "text"),
    [
        ({"python": "3.9.2"}, "HF500", Level.FATAL, "3.9.2"),
        (torch(state=TorchState.ABSENT), "HF501", Level.WARN, "not installed"),
        (torch(state=TorchState.BROKEN, error="ImportError: libcudart.so"), "HF501", Level.FATAL, "libcudart.so"),
        (torch(state=TorchState.SILENT, seconds=60.0), "HF501", Level.FATAL, "within 60 s"),
        (torch(seconds=45.0), "HF501", Level.WARN, "45 s to import"),
        (torch(gloo=False), "HF502", Level.FATAL, "without gloo"),
        (torch(distributed=False), "HF502", Level.FATAL, "without torch.distributed"),
        (torch(cuda=""), "HF503", Level.WARN, "a build for CPUs"),
        (torch(gpus=0, gpu_error="driver too old"), "HF503", Level.FATAL, "driver too old"),
        (torch(unsupported=("GPU 0 (sm_90)",)), "HF503", Level.FATAL, "sm_90"),
        ({"variables": {"CUDA_VISIBLE_DEVICES": ""}}, "HF503", Level.WARN, "hides every GPU"),
        ({"gpu_error": "Driver/library version mismatch"}, "HF504", Level.FATAL, "mismatch"),
        ({"gpus": (replace(GPU, ecc_errors=3),)}, "HF504", Level.FATAL, "GPU 0 has 3"),
        ({"gpus": (replace(GPU, memory_used_mib=30000),)}, "HF505", Level.WARN, "30000 of 140000"),
        ({"gpus": (replace(GPU, users=("pid 17 python, 9 MiB",)),)}, "HF505", Level.WARN, "pid 17"),
        (
            {"shm": Folder(path="/dev/shm", total_bytes=64 * 2**20, free_bytes=64 * 2**20)},
            "HF510",
            Level.WARN,
            "64 MiB",
        ),
        ({"shm": Folder(path="/dev/shm", total_bytes=64 * GIB, free_bytes=2**20)}, "HF510", Level.WARN, "1 MiB of"),
        ({"shm": Folder(path="/dev/shm", error="Read-only")}, "HF510", Level.FATAL, "Read-only"),
        ({"limits": {"nofile": 1024}}, "HF511", Level.WARN, "1024"),
        ({"limits": {"nproc": 512}}, "HF512", Level.WARN, "512"),
        ({"pids_limit": 600, "pids_used": 200}, "HF512", Level.WARN, "600"),
        ({"limits": {"memlock": 65536}}, "HF513", Level.WARN, "mlx5_0"),
        ({"limits": {"core": None}}, "HF514", Level.WARN, "core"),
        ({"memory_limit_bytes": GIB}, "HF515", Level.RETRY, "the cgroup allows 1 GiB"),
        ({"memory_available_bytes": GIB}, "HF515", Level.RETRY, "1 GiB of 512 GiB"),
        ({"cpu_quota": 1.5}, "HF516", Level.WARN, "1.5 CPUs' time"),
        ({"cpus_allowed": 1}, "HF516", Level.WARN, "1 of 64"),
        ({"overcommit": 2}, "HF517", Level.WARN, "overcommit_memory=2"),
        ({"ptrace_scope": 2}, "HF518", Level.WARN, "ptrace_scope=2"),
        ({"folders": (Folder(path="/logs", error="Permission denied"),)}, "HF519", Level.FATAL, "Permission denied"),
        ({"folders": (Folder(path="/logs", free_bytes=2**20),)}, "HF519", Level.WARN, "1 MiB free"),
        ({"variables": {"OMP_NUM_THREADS": "64"}}, "HF521", Level.WARN, "64 threads × 2 workers on 64 CPUs"),
        ({"variables": {"OMP_NUM_THREADS": "many"}}, "HF521", Level.WARN, "'many'"),
        ({"clock_synchronised": False}, "HF530", Level.WARN, "NTP"),
        ({"own_addresses": (), "resolve_error": "Name or service not known"}, "HF531", Level.WARN, "does not resolve"),
        ({"resolve_s": 5.0}, "HF531", Level.WARN, "5.0 s"),
        ({"own_addresses": ("127.0.1.1",)}, "HF532", Level.WARN, "node7 is 127.0.1.1, a loopback address"),
        ({"interfaces": (LO,)}, "HF534", Level.FATAL, "loopback"),
        ({"variables": {"NCCL_SOCKET_IFNAME": "ib"}}, "HF535", Level.FATAL, "ib: no such interface"),
        ({"variables": {"GLOO_SOCKET_IFNAME": "lo"}}, "HF535", Level.WARN, "lo"),
        ({"variables": {"GLOO_SOCKET_IFNAME": "eth"}}, "HF535", Level.FATAL, "eth: no such"),
        ({"interfaces": (LO, DOCKER0, ETH0)}, "HF536", Level.WARN, "docker0 beside eth0"),
        ({"endpoint_port": 40000}, "HF537", Level.WARN, "40000"),
        ({"ephemeral_ports": (60000, 60100)}, "HF537", Level.WARN, "only 101"),
        ({"endpoint_holder": "pid 4711 (alice): python"}, "HF538", Level.RETRY, "pid 4711"),
        ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, "HF539", Level.WARN, "CUDA_LAUNCH_BLOCKING=1"),
        ({"variables": {"MASTER_ADDR": "10.0.0.9", "RANK": "3"}}, "HF539", Level.WARN, "RANK, MASTER_ADDR"),
        ({"variables": {"NCCL_DEBUG_FILE": "/tmp/nccl.txt"}}, "HF539", Level.WARN, "one file"),
        ({"variables": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}}, "HF539", Level.WARN, "hangs for ever"),
    ],
)
def test_each_trouble_is_found_and_nothing_else(changes: dict[str, Any], code: str, level: Level, text: str) -> None:
    got = found(**changes)
    assert list(got) == [code]
    assert got[code][0] is level
    assert text in got[code][1]


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": (), "driver": "", "torch": replace(TORCH, cuda="", gpus=0)},
        {"nodes": 1, "own_addresses": ("127.0.1.1",), "interfaces": (LO,)},
        {"endpoint": "127.0.0.1:29400", "own_addresses": ("127.0.1.1",), "interfaces": (LO, DOCKER0)},
        {"variables": {"OMP_NUM_THREADS": "1"}, "cpus_allowed": 2},
        {"variables": {"TORCH_DISTRIBUTED_DEBUG": "INFO", "NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "0"}},
        {"variables": {"NCCL_SOCKET_IFNAME": "eth"}, "interfaces": (LO, DOCKER0, ETH0)},
        {"variables": {"GLOO_SOCKET_IFNAME": "eth0"}, "own_addresses": ("127.0.1.1",)},
        {"limits": {"core": None}, "core_pattern": "|/usr/lib/systemd/systemd-coredump %P"},
        {"infiniband": (), "limits": {"memlock": 65536}},
        {"ptrace_scope": 2, "privileged": True},
        {"clock_synchronised": None},
    ],
)
def test_what_only_looks_like_trouble_passes(changes: dict[str, Any]) -> None:
    assert found(**changes) == {}


def test_the_interface_of_the_default_route_is_proposed_else_the_fastest_that_is_no_bridge() -> None:
    slow = Interface(name="eno1", addresses=("192.168.0.7",), speed_mbit_s=1000)
    fast = Interface(name="ens5", addresses=("10.1.0.7",), speed_mbit_s=100000)
    down = Interface(name="ens9", up=False, addresses=("10.9.0.7",), speed_mbit_s=200000)
    facts = replace(WELL, interfaces=(LO, DOCKER0, slow, fast, down))
    assert proposed(replace(facts, default_interface="eno1")) == "eno1"
    assert proposed(replace(facts, default_interface="")) == "ens5"
    assert proposed(replace(facts, default_interface="docker0")) == "ens5"
    assert proposed(replace(facts, interfaces=(LO, DOCKER0))) == "docker0"
    assert proposed(replace(facts, interfaces=(LO,))) == ""


@pytest.mark.parametrize(
    ("text", "nccl", "names"),
    [
        ("eth", True, ["eth0"]),
        ("=eth", True, []),
        ("=eth0,lo", True, ["lo", "eth0"]),
        ("^docker,lo", True, ["eth0"]),
        ("^=eth0", True, ["lo", "docker0"]),
        ("eth", False, []),
        ("eth0", False, ["eth0"]),
    ],
)
def test_interfaces_are_chosen_by_the_rules_of_nccl_and_gloo(text: str, nccl: bool, names: list[str]) -> None:
    assert [each.name for each in chosen(text, (LO, DOCKER0, ETH0), nccl=nccl)] == names


def test_every_code_that_is_given_is_explained() -> None:
    import re
    from pathlib import Path

    import holdfast

    folder = Path(holdfast.__file__).parent
    sources = [*folder.glob("insight/doctor/*.py"), *folder.glob("runtime/doctor/*.py")]
    given = {code for path in sources for code in re.findall(r"HF5\d\d", path.read_text())}
    assert given == set(code_texts())
    for explained in code_texts().values():
        assert all(text.endswith(".") or "`" in text for text in explained)


def test_the_table_shows_problems_with_their_fix_and_passes_in_one_line() -> None:
    findings = examine(replace(WELL, overcommit=2, endpoint_holder="pid 1"))
    text = render(findings)
    assert "WARN  overcommit" in text
    assert "→ sysctl vm.overcommit_memory=0" in text
    assert text.splitlines()[-1].startswith("retry: 1 to try again, 1 to know; holdfast explain HF538")
    assert text.splitlines()[-1].endswith("(exit code 20)")
    assert "HF500" not in text
    assert render(examine(WELL)).splitlines()[-1].startswith("all well: ")


def test_words_of_other_nodes_cannot_upset_a_terminal() -> None:
    finding = replace(examine(WELL)[0], node="evil\x1b[2J", why="a\nb\x07", fix="\r")
    assert all(line.isprintable() for line in lines_of(finding))


def test_json_has_every_finding_and_the_worst_level() -> None:
    told = as_json(examine(replace(WELL, python="3.8.1")))
    assert (told["level"], told["exit_code"]) == ("fatal", 30)
    assert told["findings"][0]["fix"] == "install Python 3.11 or newer"


def test_a_warning_is_no_failure_unless_it_is_to_be() -> None:
    small = DoctorFinding(code="HF510", level=Level.WARN, what="/dev/shm", why="small")
    late = DoctorFinding(code="HF530", level=Level.RETRY, what="clock", why="off")
    assert [exit_code([small], strict=strict) for strict in (False, True)] == [0, 10]
    assert [exit_code([small, late], strict=strict) for strict in (False, True)] == [20, 20]
    assert render([small]).endswith("(exit code 0)")
    assert render([small], strict=True).endswith("(exit code 10)")


@pytest.mark.parametrize(
    ("cpu_s", "load", "says"),
    [(1.0, 0.2, "local disk"), (38.0, 0.9, "processor is slow"), (4.0, 8.0, "what else runs here")],
)
def test_a_slow_import_is_the_disks_fault_only_where_nothing_computes(cpu_s: float, load: float, says: str) -> None:
    found = TorchFacts(
        state=TorchState.OK, version="2", seconds=40.0, cpu_s=cpu_s, load=load, distributed=True, gloo=True
    )
    assert says in slow_import(found, "slow")[1]

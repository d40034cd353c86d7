"""Facts of a machine, read from trees that are made up, and what a process of its own says of torch; and
`holdfast doctor` as a command: the line of a run, bad lines, JSON, exit codes, and that nothing heavy is imported."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.doctor.facts import (
    FactsRequest,
    ask_torch,
    bounded,
    driver_version,
    ephemeral_ports,
    folder_facts,
    gather_facts,
    infiniband,
    interfaces,
    may_trace,
    run_bounded,
    shown_gpus,
    try_to_bind,
)
from holdfast.doctor.findings import TorchFacts, TorchState
from holdfast.doctor.machine_state import GpuState, GpuUser, MachineState
from holdfast.linux import GroupLimits, default_interface
from holdfast.protocol.options import Endpoint
from tests.support.documents import checked

GIB = 2**30


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_the_lowest_limit_of_all_cgroups_above_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kube/pod7"
    put(tmp_path, "proc/self/cgroup", "0::/kube/pod7/main\n")
    put(tmp_path, f"{group}/main/memory.max", "max\n")
    put(tmp_path, f"{group}/memory.max", f"{8 * GIB}\n")
    put(tmp_path, "sys/fs/cgroup/kube/memory.max", f"{64 * GIB}\n")
    put(tmp_path, f"{group}/main/cpu.max", "150000 100000\n")
    put(tmp_path, f"{group}/cpu.max", "max 100000\n")
    put(tmp_path, f"{group}/pids.max", "512\n")
    put(tmp_path, f"{group}/pids.current", "200\n")
    limits = GroupLimits(tmp_path)
    assert (limits.memory_bytes, limits.cpus, limits.pids, limits.pids_used) == (8 * GIB, 1.5, 512, 200)


def test_cgroup_v1_and_a_container_that_sees_the_paths_of_its_host(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "5:memory:/docker/4f\n3:cpu,cpuacct:/docker/4f\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    put(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n")
    put(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    limits = GroupLimits(tmp_path)
    assert (limits.memory_bytes, limits.cpus) == (2 * GIB, 0.5)


def test_no_cgroup_has_no_limit(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "4:memory:/\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    limits = GroupLimits(tmp_path)
    assert (limits.memory_bytes, limits.cpus, limits.pids) == (None, None, None)
    assert GroupLimits(tmp_path / "nothing").memory_bytes is None


def test_driver_route_and_ports_are_read(tmp_path: Path) -> None:
    put(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC\n")
    route = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    route += "wlan0\t00000000\t0101\t3\t0\t0\t600\t00000000\neth0\t00000000\t0101\t3\t0\t0\t100\t00000000\n"
    put(tmp_path, "proc/net/route", route + "eth0\t0000A8C0\t0\t1\t0\t0\t0\t00FFFFFF\n")
    put(tmp_path, "proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
    put(tmp_path, "proc/self/status", "Name:\tx\nCapEff:\t0000000000080000\n")
    assert driver_version(tmp_path) == "570.86.15"
    assert default_interface(tmp_path) == "eth0"
    assert ephemeral_ports(tmp_path) == (32768, 60999)
    assert may_trace(tmp_path)
    nothing = tmp_path / "nothing"
    assert driver_version(nothing) == default_interface(nothing) == ""
    assert ephemeral_ports(nothing) is None
    assert infiniband(nothing) == ()


def test_a_folder_is_written_to_and_one_that_is_yet_to_be_made_is_its_parent(tmp_path: Path) -> None:
    assert folder_facts(str(tmp_path)).error == ""
    later = folder_facts(str(tmp_path / "runs" / "a"))
    assert later.error == ""
    assert later.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert folder_facts(str(tmp_path / "file" / "x")).error == "Not a directory"


def test_gpus_are_shown_in_the_figures_of_earlier_versions() -> None:
    users = (GpuUser(4711, 30400 << 20, "python"), GpuUser(4712, 8 << 20, "train"))
    one = GpuState(index=0, name="NVIDIA H200", memory_bytes=143771 << 20, memory_used_bytes=30412 << 20, users=users)
    two = GpuState(index=1, error="GPU is lost")
    first, second = shown_gpus(MachineState(source="NVML", driver="570.86.15", gpus=(one, two)))
    assert (first.index, first.name, first.driver) == (0, "NVIDIA H200", "570.86.15")
    assert (first.memory_total_mib, first.memory_used_mib, first.ecc_errors) == (143771, 30412, None)
    assert first.users == ("pid 4711 python, 30400 MiB", "pid 4712 train, 8 MiB")
    assert (second.memory_total_mib, second.users) == (None, ())


FAKE = """
__version__ = "9.9.0"
class distributed:
    is_available = staticmethod(lambda: True)
    is_gloo_available = staticmethod(lambda: True)
class version:
    cuda = None
"""


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of a torch that is found before any other."""
    put(tmp_path, "packages/torch/__init__.py", FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    return tmp_path / "packages" / "torch" / "__init__.py"


async def torch_of(
    source: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float = 30.0
) -> TorchFacts:
    """What is said of a torch whose source is this; None: of none at all."""
    if source is None:
        source = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    put(folder, "torch/__init__.py", source)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return await ask_torch(sys.executable, limit_s)


async def test_torch_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = await torch_of("print('hello from a sitecustomize')\n" + FAKE, tmp_path, monkeypatch)
    assert (got.state, got.version, got.gloo, got.cuda) == (TorchState.OK, "9.9.0", True, "")


CUDA = """
version.cuda = "12.6"
class cuda:
    class nccl:
        version = staticmethod(lambda: (2, 27, 3))
    init = staticmethod(lambda: INIT)
    device_count = staticmethod(lambda: 2)
    get_arch_list = staticmethod(lambda: ARCHS)
    get_device_capability = staticmethod(lambda index: ((9, 0), (12, 1))[index])
"""


@pytest.mark.parametrize(
    ("archs", "unsupported"),
    [
        (["sm_80", "sm_90a", "sm_120"], ()),
        (["sm_80", "sm_90"], ("GPU 1 (sm_121)",)),
        (["sm_80", "compute_80"], ()),
        (["sm_80", "compute_120"], ("GPU 0 (sm_90)",)),
        ([], ()),
    ],
)
async def test_gpus_without_code_in_this_build_are_named(
    archs: list[str], unsupported: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FAKE + CUDA.replace("ARCHS", repr(archs)).replace("INIT", "None")
    got = await torch_of(source, tmp_path, monkeypatch)
    assert (got.cuda, got.nccl, got.gpus, got.unsupported) == ("12.6", "2.27.3", 2, unsupported)


async def test_what_cuda_says_of_an_old_driver_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = await torch_of(FAKE + CUDA.replace("INIT", "1 / 0"), tmp_path, monkeypatch)
    assert (got.state, got.gpus, got.gpu_error) == (TorchState.OK, 0, "division by zero")


@pytest.mark.parametrize(
    ("source", "state", "text"),
    [
        (None, TorchState.ABSENT, ""),
        ("raise ImportError('libcudart.so.12: cannot open')", TorchState.BROKEN, "ImportError: libcudart.so.12"),
        ("import os; os.abort()", TorchState.BROKEN, "its process ended with -6"),
        ("import sys; sys.exit('no licence')", TorchState.BROKEN, "no licence"),
        ("__version__ = '1'", TorchState.BROKEN, "AttributeError"),
    ],
)
async def test_torch_that_is_absent_or_broken_is_an_answer(
    source: str | None, state: TorchState, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = await torch_of(source, tmp_path, monkeypatch)
    assert got.state is state
    assert text in got.error


async def test_torch_whose_import_hangs_is_given_up_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"
    assert (await torch_of(source, tmp_path, monkeypatch, limit_s=1.0)).state is TorchState.SILENT


async def test_a_python_that_is_not_there_is_an_answer() -> None:
    got = await ask_torch("/nowhere/python", 5.0)
    assert got.state is TorchState.BROKEN
    assert "No such file" in got.error


async def test_a_call_that_hangs_gives_the_other_answer() -> None:
    reader, writer = os.pipe()
    try:
        assert await bounded(lambda: os.read(reader, 1), 0.1, b"late") == b"late"
    finally:
        os.write(writer, b"x")  # lets the thread go
    os.close(writer)
    os.close(reader)


async def test_a_program_is_run_to_its_end() -> None:
    done = await run_bounded(["sh", "-c", "echo out; echo err >&2; exit 3"], 10.0)
    assert done == (3, "out\n", "err\n")


def test_the_endpoint_is_tried_by_binding(free_port) -> None:
    port = free_port()
    assert try_to_bind(Endpoint(host="127.0.0.1", port=port)) == (True, "")
    assert try_to_bind(Endpoint(host="192.0.2.99", port=port)) == (False, "")
    with socket.socket() as held:
        held.bind(("127.0.0.1", port))
        held.listen()
        here, holder = try_to_bind(Endpoint(host="127.0.0.1", port=port))
    assert here
    assert f"pid {os.getpid()} " in holder


async def test_all_facts_of_this_machine_are_gathered(tmp_path: Path, fake_torch: Path) -> None:
    asked = FactsRequest(sys.executable, 2, 1, str(tmp_path), None, True, {"RANK": "1", "HOME": "/"}, 30.0)
    facts = await gather_facts(asked)
    assert facts.torch.version == "9.9.0"
    assert facts.python == sys.version.split()[0]
    assert facts.memory_bytes > 0
    assert facts.cpus >= facts.cpus_allowed >= 1
    assert facts.limits["nofile"]
    assert any(each.name == "lo" for each in facts.interfaces)
    assert facts.folders[0].path == str(tmp_path)
    assert facts.variables == {"RANK": "1"}


# --- the command ------------------------------------------------------------------------------------------------------


def told(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object]]:
    code = main(["doctor", "--json", *argv])
    return code, checked("doctor", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--nnodes", "two"], "HF103", "--nnodes two"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:b:c"], "HF105", "a:b:c"),
        (["--timeout", "0"], "HF101", "--timeout 0.0"),
        (["--timeout", "soon"], "HF101", "not a number"),
        (["--all-reduce", "maybe"], "HF101", "auto, off"),
        (["--nproc-per-node", "0"], "HF104", "at least 1"),
        (["--no-such-option"], "HF101", "--no-such-option is not an option"),
        (["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "a"], "HF106", "to a port of one of them"),
        (["--nnodes", "2", "--rdzv-backend", "c10", "--rdzv-endpoint", "a"], "HF106", "did you mean"),
    ],
)
def test_a_bad_line_is_one_message_and_exit_code_2(
    argv: list[str], code: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"holdfast: {code}: ")
    assert text in err


def test_help_names_its_own_options_and_those_of_a_run_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    out = capsys.readouterr().out
    for name in ("--timeout", "--all-reduce", "--json", "--nnodes", "--rdzv-endpoint", "--rdzv-id", "--master-addr"):
        assert f"  {name} " in out
    assert "--tee" not in out


def test_the_line_of_a_run_is_taken_as_it_is_and_its_script_is_not_started(
    fake_torch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    line = ["--standalone", "--nproc-per-node", "2", "--tee", "3", "--max-restarts=3", str(script), "--epochs", "3"]
    code, document = told(line, capsys)
    assert code == document["exit_code"]
    assert code in (0, 10, 20)
    assert document["facts"]["nproc"] == 2  # type: ignore[index]
    assert document["facts"]["torch"]["version"] == "9.9.0"  # type: ignore[index]
    assert not (tmp_path / "ran").exists()


def test_a_torch_that_crashes_is_fatal_and_the_doctor_lives(
    fake_torch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_torch.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert main(["doctor"]) == 30
    out = capsys.readouterr().out
    assert "FATAL torch                HF501 cannot be imported: its process ended with -11" in out
    assert out.splitlines()[-1].startswith("fatal: ")


def test_a_port_that_is_held_is_a_reason_to_try_again(
    fake_torch: Path, free_port, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"
        code, document = told(["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint], capsys)
    assert code == 20
    findings = document["findings"]
    assert isinstance(findings, list)
    (found,) = [each for each in findings if each["code"] == "HF538"]
    assert found["level"] == "retry"


def test_a_log_folder_that_cannot_be_written_is_fatal(
    fake_torch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    code, document = told(["--log-dir", str(tmp_path / "file" / "runs")], capsys)
    assert code == 30
    assert "Not a directory" in json.dumps(document["findings"])


def test_the_doctor_imports_no_torch() -> None:
    code = "import sys; from holdfast.cli import main; main(['doctor', '--json']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_an_interface_whose_state_the_kernel_does_not_tell_counts_as_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under an emulator. No interface at all would be a failure of its own."""

    def fails() -> None:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr("psutil.net_if_stats", fails)
    assert next(each for each in interfaces() if each.name == "lo").up

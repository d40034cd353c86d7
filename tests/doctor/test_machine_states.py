"""States of machines, healthy and not, through the reader and the rules: which nodes may train."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from holdfast.doctor.device_events import changes
from holdfast.doctor.findings import DoctorFinding, Level
from holdfast.doctor.gpu_rules import examine_machine, port_health
from holdfast.doctor.machine_reader import XidSource, has_gpus, read_machine, read_nvml, read_smi, used_memory
from holdfast.doctor.machine_state import (
    GpuState,
    MachineState,
    NetworkPort,
    Recovery,
    Slowdown,
    Virtual,
    used_gpus,
    visible_gpus,
)
from tests.support.fake_nvml import FakeNvml

MS = 1
"""Limit of a wait for an event that is there, or never comes (ms)."""
FOLDER = Path(__file__).parent / "machines"
NVML = tomllib.loads((FOLDER / "nvml.toml").read_text())


def nvml_of(machine: dict[str, Any]) -> FakeNvml:
    """The double of this machine."""
    gpus = []
    for index in range(machine["gpus"]):
        answers = (
            NVML["profiles"][machine["profile"]] | machine.get("all", {}) | machine.get("gpu", {}).get(str(index), {})
        )
        answers = {
            name: value.replace("{index}", str(index)) if isinstance(value, str) else value
            for name, value in answers.items()
        }
        gpus.append(answers)
    return FakeNvml(gpus, machine.get("system"))


def judged(state: MachineState, machine: dict[str, Any]) -> list[DoctorFinding]:
    return list(examine_machine(state, visible_gpus(state.gpus, machine.get("visible"))))


def check(found: list[DoctorFinding], machine: dict[str, Any]) -> None:
    stops = {each.code for each in found if each.level in (Level.RETRY, Level.FATAL)}
    notes = {each.code for each in found if each.level is Level.WARN}
    assert (stops, notes) == (set(machine.get("faults", ())), set(machine.get("notes", ())))
    assert any(machine.get("says", "") in each.why for each in found) or "says" not in machine, found
    assert all(each.fix for each in found if each.level is not Level.PASS)


@pytest.mark.parametrize("machine", NVML["machine"], ids=lambda machine: machine["name"])
def test_a_machine_that_nvml_describes_is_judged_right(machine: dict[str, Any]) -> None:
    nvml = nvml_of(machine)
    state = read_nvml(nvml)
    assert state is not None
    check(judged(state, machine), machine)
    assert nvml.began == 0


def test_half_of_the_machines_are_healthy() -> None:
    healthy = [machine for machine in NVML["machine"] if not machine.get("faults")]
    assert len(NVML["machine"]) >= 40
    assert len(healthy) >= len(NVML["machine"]) // 2


SMI = {
    "h100-healthy.xml": {},
    "rtx4070-laptop.xml": {},
    "l4-remap-pending.xml": {"faults": ["HF504"], "says": "GPU 1: rows of its memory have failed"},
    "a100-requires-reset.xml": {"faults": ["HF504"], "says": "GPU 0: GPU requires a reset"},
    "h100-power-brake.xml": {"faults": ["HF507"], "says": "GPU 0: its clocks are lowered: hardware power brake"},
    "handle.txt": {"faults": ["HF504"], "says": "Unable to determine the device handle"},
    "no-devices.txt": {},
}


@pytest.mark.parametrize("name", SMI)
def test_a_machine_that_nvidia_smi_describes_is_judged_right(name: str) -> None:
    state = read_smi((FOLDER / name).read_text)
    check(judged(state, SMI[name]), SMI[name])


def test_both_sources_give_the_same_state() -> None:
    by_smi = read_smi((FOLDER / "h100-healthy.xml").read_text).gpus[0]
    by_nvml = read_nvml(FakeNvml([NVML["profiles"]["h100"]]))
    assert by_nvml is not None
    names = ("name", "vbios", "virtual", "mig", "persistence", "power_limit_w", "recovery", "remap_pending", "celsius")
    names += ("ecc_uncorrected", "sram_worn", "fabric", "fabric_error", "pcie_width", "pcie_generation_max", "sm_mhz")
    assert [getattr(by_smi, name) for name in names] == [getattr(by_nvml.gpus[0], name) for name in names]
    assert by_smi.virtual is Virtual.NO
    assert by_smi.recovery is Recovery.NONE


def test_what_a_driver_prints_around_its_answer_is_left_out() -> None:
    xml = (FOLDER / "h100-healthy.xml").read_text()
    assert read_smi(lambda: f"WARNING: infoROM is corrupted\n{xml}\ntail") == read_smi(lambda: xml)
    cut = read_smi(lambda: xml[: len(xml) // 2])
    assert cut == MachineState(), "nothing is known, and that is no fault of the node"


def test_a_silent_nvidia_smi_is_a_fault_and_a_missing_one_is_none() -> None:
    def silent() -> str:
        raise subprocess.TimeoutExpired("nvidia-smi", 15.0)

    def missing() -> str:
        raise FileNotFoundError

    check(judged(read_smi(silent), {}), {"faults": ["HF504"], "says": "no answer within 15 s"})
    assert read_smi(missing) == MachineState()


def put(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_a_machine_without_gpus_asks_no_driver(tmp_path: Path) -> None:
    def never() -> str:
        raise AssertionError("nvidia-smi was asked")

    assert not has_gpus(tmp_path)
    assert read_machine(tmp_path, nvml=object(), smi=never) == MachineState()


def test_without_nvmls_library_nvidia_smi_is_asked(tmp_path: Path) -> None:
    put(tmp_path, {"proc/driver/nvidia/version": "NVRM version"})
    nvml = FakeNvml([], {"nvmlInit": "error:LIBRARY_NOT_FOUND"})
    state = read_machine(tmp_path, nvml, (FOLDER / "h100-healthy.xml").read_text)
    assert (state.source, len(state.gpus)) == ("nvidia-smi", 1)


AMD = {
    "vendor": "0x1002\n",
    "device": "0x74a1\n",
    "product_name": "AMD Instinct MI300X\n",
    "unique_id": "8d2f1a5b\n",
    "vbios_version": "113-M3000100-102\n",
    "mem_info_vram_total": "206141652992\n",
    "mem_info_vram_used": "297193472\n",
    "current_link_width": "16\n",
    "max_link_width": "16\n",
    "pcie_replay_count": "0\n",
    "pp_dpm_sclk": "0: 132Mhz *\n1: 2100Mhz\n",
    "ras/umc_err_count": "ue: 0\nce: 7\n",
    "hwmon/hwmon3/temp2_input": "41000\n",
    "hwmon/hwmon3/temp2_crit": "100000\n",
    "hwmon/hwmon3/power1_cap": "750000000\n",
}


def amd(root: Path, **changed: str) -> MachineState:
    files = AMD | {name.replace("__", "/"): text for name, text in changed.items()}
    put(root, {f"sys/class/drm/card1/device/{name}": text for name, text in files.items()})
    put(root, {"sys/class/drm/card0/device/vendor": "0x1a03\n", "sys/class/drm/card1-DP-1/status": "disconnected"})
    return read_machine(root)


def test_an_amd_gpu_is_read_from_sys_and_healthy(tmp_path: Path) -> None:
    state = amd(tmp_path)
    (gpu,) = state.gpus
    assert (state.source, gpu.name, gpu.power_limit_w, gpu.celsius) == ("sysfs", "AMD Instinct MI300X", 750, 41)
    assert (gpu.sm_mhz, gpu.sm_mhz_max, gpu.ecc_uncorrected) == (132, 2100, 0)
    check(judged(state, {}), {})


def test_an_amd_gpu_with_uncorrected_errors_parks_its_node(tmp_path: Path) -> None:
    check(
        judged(amd(tmp_path, ras__umc_err_count="ue: 3\nce: 0\n"), {}), {"faults": ["HF504"], "says": "3 uncorrected"}
    )


def port(root: Path, name: str, **files: str) -> None:
    healthy = {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
    }
    put(root, {f"sys/class/infiniband/{name}/ports/1/{file}": f"{text}\n" for file, text in (healthy | files).items()})
    put(root, {f"sys/class/infiniband/{name}/ports/1/counters/link_downed": files.get("downed", "0")})


def test_ports_are_read_and_one_without_a_subnet_manager_is_reported(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", state="1: DOWN", phys_state="3: Disabled")  # no cable: nothing is wrong
    port(tmp_path, "mlx5_2", rate="25 Gb/sec (1X EDR)", link_layer="Ethernet", downed="4")
    state = read_machine(tmp_path)
    assert [(each.name, each.state, each.rate_gbit_s, each.downed) for each in state.ports] == [
        ("mlx5_0/1", "ACTIVE", 400.0, 0),
        ("mlx5_1/1", "DOWN", 400.0, 0),
        ("mlx5_2/1", "ACTIVE", 25.0, 4),
    ]
    check(list(port_health(state.ports)), {})
    port(tmp_path, "mlx5_3", state="2: INIT")
    check(
        list(port_health(read_machine(tmp_path).ports)),
        {"notes": ["HF509"], "says": "mlx5_3/1 has a link, but is INIT"},
    )


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-b", [1]),
        ("0,7,1", [0]),  # CUDA's list ends at the first GPU that does not exist
        ("MIG-3f1", [0, 1, 2]),
        ("-1", []),
    ],
)
def test_gpus_that_workers_do_not_use_are_left_out(visible: str | None, indices: list[int]) -> None:
    gpus = tuple(GpuState(index=index, uuid=f"GPU-{letter}") for index, letter in enumerate("abc"))
    assert [gpu.index for gpu in visible_gpus(gpus, visible)] == indices


def test_amds_variables_choose_amds_gpus_alone() -> None:
    gpus = (GpuState(index=0), GpuState(index=1))
    environ = {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert used_gpus(MachineState(source="sysfs", gpus=gpus), environ) == (gpus[1],)
    assert used_gpus(MachineState(source="NVML", gpus=gpus), environ) == (gpus[0],)
    assert used_gpus(MachineState(source="sysfs", gpus=gpus), {}) == gpus


def test_a_software_power_cap_is_no_fault() -> None:
    gpu = GpuState(index=0, slowdowns=frozenset({Slowdown.POWER_CAP}))
    check(list(examine_machine(MachineState(source="NVML", gpus=(gpu,)), (gpu,))), {})


# --- while a job runs --------------------------------------------------------------------------------------------------


def one(**changed: Any) -> MachineState:
    """A machine with one GPU and one port, after months."""
    known = {"ecc_uncorrected": 0, "remap_pending": False, "links_active": 18, "link_errors": 7, "pcie_replays": 3}
    known |= {"sm_mhz": 1980, "sm_mhz_max": 1980, "celsius": 61, "recovery": Recovery.NONE}
    link = {"state": "ACTIVE", "downed": 2} | {
        name: changed.pop(name) for name in ("state", "downed") if name in changed
    }
    return MachineState(gpus=(GpuState(index=3, **known | changed),), ports=(NetworkPort(name="mlx5_0/1", **link),))


@pytest.mark.parametrize(
    ("changed", "text", "severe"),
    [
        ({"error": "GPU is lost"}, "GPU is lost on GPU 3 of node b", True),
        ({"ecc_uncorrected": 1}, "1 uncorrected memory error on GPU 3 of node b", True),
        ({"remap_pending": True}, "memory rows are to be replaced on GPU 3 of node b", True),
        ({"recovery": Recovery.RESET}, "the driver asks for a reset of the GPU on GPU 3 of node b", True),
        ({"links_active": 16}, "2 NVLinks went down on GPU 3 of node b", True),
        ({"link_errors": 19}, "12 NVLink errors on GPU 3 of node b", False),
        ({"pcie_replays": 503}, "500 PCIe replays on GPU 3 of node b", False),
        ({"downed": 3}, "the link went down 1 time on mlx5_0/1 of node b", True),
        ({"state": "INIT"}, "the port is INIT on mlx5_0/1 of node b", True),
        (
            {"slowdowns": frozenset({Slowdown.HARDWARE, Slowdown.HARDWARE_THERMAL}), "sm_mhz": 345, "celsius": 91},
            "hardware thermal slowdown: 345 of 1980 MHz, 91 °C, hardware slowdown, hardware thermal slowdown on GPU 3 of node b",
            False,
        ),
    ],
)
def test_what_has_happened_to_a_device_between_two_readings(changed: dict[str, Any], text: str, severe: bool) -> None:
    (event,) = changes(one(), one(**changed))
    assert (event.on("b"), event.severe) == (text, severe)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"ecc_uncorrected": None, "links_active": None, "recovery": None},
        {"pcie_replays": 12, "celsius": 80, "sm_mhz": 1200},
        {"slowdowns": frozenset({Slowdown.POWER_CAP})},  # every busy GPU has it
        {"downed": 0, "link_errors": 0},  # the driver was loaded again
    ],
)
def test_what_is_normal_or_unknown_is_no_event(changed: dict[str, Any]) -> None:
    assert list(changes(one(), one(**changed))) == []


def test_a_gpu_that_stays_lost_is_reported_once() -> None:
    lost = one(error="GPU is lost")
    assert list(changes(lost, lost)) == []
    assert list(changes(MachineState(), one())) == []


def test_xids_come_with_the_gpu_that_has_them() -> None:
    nvml = FakeNvml([{}, {"events": "error:NOT_SUPPORTED"}, {}])
    source = XidSource(nvml)
    assert source.gpus == 2
    nvml.events = [(2, 79), (1, 31)]
    assert source.wait(MS) == (2, 79)
    assert source.wait(MS) == (None, 31)  # the driver has named no GPU that is watched
    assert source.wait(MS) is None
    source.close()
    assert nvml.began == 0


def test_used_memory_is_that_of_the_gpus_that_report_it(tmp_path: Path) -> None:
    put(tmp_path, {"proc/driver/nvidia/version": "NVRM version"})
    nvml = FakeNvml([{"MemoryInfo": {"used": 7}}, {"handle": "error:GPU_IS_LOST"}, {"MemoryInfo": {"used": 9}}])
    assert used_memory(nvml, tmp_path) == {0: 7, 2: 9}
    assert used_memory(FakeNvml([], {"nvmlInit": "error:UNKNOWN"}), tmp_path) == {}
    amd(tmp_path / "other")
    assert used_memory(None, tmp_path / "other") == {0: 297193472}

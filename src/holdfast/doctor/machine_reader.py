"""Reads the state of this machine's GPUs and network ports: through NVML, else from nvidia-smi, else from /sys.

It blocks, and a faulty driver may block it for ever: call it in a thread, with a limit of time. A question that the
driver does not support, or does not allow, leaves that value unknown. Judges nothing.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.doctor.machine_state import (
    Fabric,
    GpuState,
    GpuUser,
    MachineState,
    NetworkPort,
    Recovery,
    Slowdown,
    Virtual,
)
from holdfast.linux import read_int, read_text

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET  # a start of a job with a preflight needs it only where there is no NVML

ROOT = Path("/")
SMI = ("nvidia-smi", "-q", "-x")
SMI_S_MAX = 15.0
LINKS_MAX = 36
AMD = "0x1002"
LOST = "GPU is lost"
NEEDS_RESET = "GPU requires a reset"
NO_ANSWER = re.compile(r"^(|N/A|\[.*\]|Requested functionality.*|Unknown Error|ERR!|Not Supported)$", re.IGNORECASE)
"""Texts of nvidia-smi for a value that the driver does not report."""

RECOVERIES = dict(enumerate(Recovery))
"""The actions by the numbers of NVML_GPU_RECOVERY_ACTION_*."""
RECOVERY_NAMES = {
    "None": Recovery.NONE,
    "Reset": Recovery.RESET,
    "Reboot": Recovery.REBOOT,
    "Drain P2P": Recovery.DRAIN_P2P,
    "Drain and Reset": Recovery.DRAIN_AND_RESET,
}
"""The actions by nvidia-smi's words."""
FABRICS = dict(enumerate(Fabric))
SLOWDOWNS = {
    0x04: Slowdown.POWER_CAP,
    0x08: Slowdown.HARDWARE,
    0x20: Slowdown.SOFTWARE_THERMAL,
    0x40: Slowdown.HARDWARE_THERMAL,
    0x80: Slowdown.POWER_BRAKE,
}
"""The reasons by the bits of nvmlClocksEventReason*."""
SLOWDOWN_NAMES = {
    "sw_power_cap": Slowdown.POWER_CAP,
    "hw_slowdown": Slowdown.HARDWARE,
    "sw_thermal_slowdown": Slowdown.SOFTWARE_THERMAL,
    "hw_thermal_slowdown": Slowdown.HARDWARE_THERMAL,
    "hw_power_brake_slowdown": Slowdown.POWER_BRAKE,
}
VIRTUALS = {0: Virtual.NO, 1: Virtual.PASSTHROUGH, 2: Virtual.VGPU}


def read_machine(root: Path = ROOT, nvml: Any = None, smi: Callable[[], str] | None = None) -> MachineState:
    """The state of this machine. `nvml`: the module to use instead of pynvml; `smi`: returns what nvidia-smi prints."""
    ports = network_ports(root)
    if has_nvidia(root):
        if nvml is None:
            nvml = _own_nvml()
        found = read_nvml(nvml) if nvml is not None else None
        return _with_ports(found if found is not None else read_smi(smi or _ask_smi), ports)
    gpus = amd_gpus(root)
    return MachineState(source="sysfs" if gpus else "", gpus=gpus, ports=ports)


def has_nvidia(root: Path = ROOT) -> bool:
    """Whether NVIDIA's driver is here, by its files: NVML takes time where there is none."""
    dev = root / "dev"
    # Under WSL the driver is that of Windows: then there is only this device.
    if (root / "proc/driver/nvidia/version").exists() or (dev / "dxg").exists():
        return True
    return any(name.removeprefix("nvidia").isdecimal() for name in _names(dev) if name.startswith("nvidia"))


def has_gpus(root: Path = ROOT) -> bool:
    """The same, of any maker whose state can be read."""
    return has_nvidia(root) or any(True for _ in _amd_devices(root))


def _with_ports(state: MachineState, ports: tuple[NetworkPort, ...]) -> MachineState:
    return MachineState(source=state.source, driver=state.driver, gpus=state.gpus, error=state.error, ports=ports)


def _own_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


# --- NVML -------------------------------------------------------------------------------------------------------------


class _LostError(Exception):
    """The driver cannot use this GPU any more."""


def read_nvml(nvml: Any) -> MachineState | None:
    """The state by NVML; None: its library is not here."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # nvidia-smi may be there all the same (test_without_nvmls_library_nvidia_smi_is_asked).
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION):
            return None
        # A driver without GPUs is normal on login nodes.
        lost = error.value not in (nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.NVML_ERROR_NOT_FOUND)
        return MachineState(source="NVML", error=str(error) if lost else "")
    try:
        driver = _text(_ask(nvml, "nvmlSystemGetDriverVersion"))
        count = _ask(nvml, "nvmlDeviceGetCount") or 0
        return MachineState(source="NVML", driver=driver, gpus=tuple(_gpu(nvml, index) for index in range(count)))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> GpuState:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        # Others' GPUs in a container: not allowed, and so not ours.
        error_text = "" if error.value == nvml.NVML_ERROR_NO_PERMISSION else _lost_text(nvml, error) or str(error)
        return GpuState(index=index, error=error_text)
    try:
        return _state(nvml, index, handle)
    except _LostError as lost:
        return GpuState(index=index, error=str(lost))


def _state(nvml: Any, index: int, handle: Any) -> GpuState:
    """Raises _LostError."""

    def ask(name: str, *rest: Any) -> Any:
        return _ask(nvml, name, handle, *rest)

    fields = _fields(nvml, handle)
    memory, mig, rows = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetMigMode"), ask("nvmlDeviceGetRemappedRows")
    links, active = _links(nvml, handle, fields.get("NVLINK_LINK_COUNT"))
    fabric, fabric_error = _fabric(nvml, handle)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name in drivers before 535
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    pci = ask("nvmlDeviceGetPciInfo")
    errors = [fields[name] for name in LINK_ERRORS if name in fields]
    return GpuState(
        index=index,
        name=_text(ask("nvmlDeviceGetName")),
        uuid=_text(ask("nvmlDeviceGetUUID")),
        bus=_bus(_text(getattr(pci, "busId", ""))),
        vbios=_text(ask("nvmlDeviceGetVbiosVersion")),
        virtual=VIRTUALS.get(mode) if (mode := ask("nvmlDeviceGetVirtualizationMode")) is not None else None,
        mig=mig[0] == nvml.NVML_DEVICE_MIG_ENABLE if mig is not None else None,
        persistence=_flag(ask("nvmlDeviceGetPersistenceMode")),
        memory_bytes=memory.total if memory is not None else None,
        memory_used_bytes=memory.used if memory is not None else None,
        users=_users(nvml, ask("nvmlDeviceGetComputeRunningProcesses") or ()),
        power_limit_w=_watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
        power_default_w=_watts(ask("nvmlDeviceGetPowerManagementDefaultLimit")),
        recovery=RECOVERIES.get(fields["GET_GPU_RECOVERY_ACTION"]) if "GET_GPU_RECOVERY_ACTION" in fields else None,
        remap_pending=bool(rows[2]) if rows is not None else None,
        remap_failed=bool(rows[3]) if rows is not None else None,
        remapped=rows[0] + rows[1] if rows is not None else None,
        retirement_pending=_flag(ask("nvmlDeviceGetRetiredPagesPendingStatus")),
        ecc_uncorrected=ask(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        sram_worn=_sram_worn(nvml, handle),
        links=links,
        links_active=active,
        link_errors=sum(errors) if errors else None,
        fabric=fabric,
        fabric_error=fabric_error,
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_generation_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_replays=ask("nvmlDeviceGetPcieReplayCounter"),
        slowdowns=frozenset(each for bit, each in SLOWDOWNS.items() if (reasons or 0) & bit),
        celsius=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        celsius_slowdown=ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        sm_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        sm_mhz_max=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
    )


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """NVML's answer; None: there is none here. Raises _LostError."""
    function = getattr(nvml, name, None)
    if function is None:  # an older nvidia-ml-py
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        if text := _lost_text(nvml, error):
            raise _LostError(text) from None
        return None


def _lost_text(nvml: Any, error: Any) -> str:
    texts = {nvml.NVML_ERROR_GPU_IS_LOST: LOST, nvml.NVML_ERROR_RESET_REQUIRED: NEEDS_RESET}
    return texts.get(error.value, "")


LINK_ERRORS = (
    "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    "NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
)
FIELDS = ("GET_GPU_RECOVERY_ACTION", "NVLINK_LINK_COUNT", *LINK_ERRORS)


def _fields(nvml: Any, handle: Any) -> dict[str, int]:
    """The values of NVML_FI_DEV_*, those that the driver has."""
    numbers = {name: getattr(nvml, f"NVML_FI_DEV_{name}", None) for name in FIELDS}
    known = {name: number for name, number in numbers.items() if number is not None}
    values = _ask(nvml, "nvmlDeviceGetFieldValues", handle, list(known.values())) or ()
    found = {}
    for name, value in zip(known, values, strict=False):
        if value.nvmlReturn == nvml.NVML_SUCCESS:
            # A union: the other member has only a part of the value, or what was there before.
            wide = value.valueType in (nvml.NVML_VALUE_TYPE_UNSIGNED_LONG, nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)
            found[name] = int(value.value.ullVal if wide else value.value.uiVal)
    return found


def _links(nvml: Any, handle: Any, count: int | None) -> tuple[int | None, int | None]:
    """The NVLinks of the GPU, and those that are active."""
    states = []
    for link in range(min(LINKS_MAX if count is None else count, LINKS_MAX)):
        state = _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if state is None:
            break
        states.append(state)
    if not states:
        return None, None
    return len(states), sum(state == nvml.NVML_FEATURE_ENABLED for state in states)


def _fabric(nvml: Any, handle: Any) -> tuple[Fabric | None, int | None]:
    kind = getattr(nvml, "c_nvmlGpuFabricInfo_v2_t", None)
    if kind is None:
        return None, None
    info = kind()
    if _ask(nvml, "nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info)) is None:
        return None, None
    return FABRICS.get(info.state), info.status


def _sram_worn(nvml: Any, handle: Any) -> bool | None:
    kind = getattr(nvml, "c_nvmlEccSramErrorStatus_v1_t", None)
    if kind is None:
        return None
    status = kind()
    if _ask(nvml, "nvmlDeviceGetSramEccErrorStatus", handle, ctypes.byref(status)) is None:
        return None
    return bool(status.bThresholdExceeded)


def _users(nvml: Any, processes: Iterable[Any]) -> tuple[GpuUser, ...]:
    return tuple(
        GpuUser(each.pid, each.usedGpuMemory, os.path.basename(_text(_ask(nvml, "nvmlSystemGetProcessName", each.pid))))
        for each in processes
    )


def _text(value: Any) -> str:
    """Older versions of nvidia-ml-py return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _watts(milliwatts: int | None) -> int | None:
    return None if milliwatts is None else round(milliwatts / 1000)


def _bus(text: str) -> str:
    """The address as the kernel log has it: `00000000:3B:00.0` is `0000:3b:00`."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}" if rest else ""


# --- nvidia-smi -------------------------------------------------------------------------------------------------------


def _ask_smi() -> str:
    """What `nvidia-smi -q -x` prints. Raises OSError and SubprocessError."""
    done = subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_S_MAX, check=False)
    return done.stdout or done.stderr


def read_smi(smi: Callable[[], str]) -> MachineState:
    """The state by nvidia-smi."""
    try:
        text = smi()
    # A driver that hangs is a fault of the node, and a program that is not installed is none
    # (test_a_silent_nvidia_smi_is_a_fault_and_a_missing_one_is_none).
    except subprocess.TimeoutExpired:
        return MachineState(source="nvidia-smi", error=f"no answer within {SMI_S_MAX:g} s")
    except (OSError, subprocess.SubprocessError):
        return MachineState()  # it is not here: nothing is known
    import xml.etree.ElementTree as ET

    try:
        # Some drivers print warnings around it.
        found = re.search(r"<nvidia_smi_log\b.*</nvidia_smi_log>", text, re.DOTALL)
        log = ET.fromstring(found[0] if found is not None else text)
    except ET.ParseError:
        if "<nvidia_smi_log" in text:
            return MachineState()  # it cannot be read: nothing is known, and no fault of the node is shown
        first = next((line.strip() for line in text.splitlines() if line.strip()), "it prints nothing")
        quiet = "No devices were found" in text
        return MachineState(source="nvidia-smi", error="" if quiet else first[:400])
    gpus = tuple(_smi_gpu(index, gpu) for index, gpu in enumerate(log.findall("gpu")))
    return MachineState(source="nvidia-smi", driver=_say(log, "driver_version") or "", gpus=gpus)


def _say(element: ET.Element, path: str) -> str | None:
    """The text there; None: it is missing, or says that there is no answer."""
    text = (element.findtext(path) or "").strip()
    return None if NO_ANSWER.match(text) else text


def _number(element: ET.Element, *paths: str) -> int | None:
    """The number at the first of these paths that has one: names differ between drivers."""
    for path in paths:
        found = re.match(r"-?\d+", _say(element, path) or "")
        if found:
            return int(found[0])
    return None


def _yes(element: ET.Element, path: str) -> bool | None:
    text = _say(element, path)
    return None if text is None else text in ("Yes", "Enabled", "Active")


def _mebibytes(element: ET.Element, path: str) -> int | None:
    number = _number(element, path)
    return None if number is None else number * 2**20


def _smi_gpu(index: int, gpu: ET.Element) -> GpuState:
    whole = "".join(gpu.itertext())
    # It is written in the place of whatever value cannot be read (tests/doctor/machines/a100-requires-reset.xml).
    error = LOST if "GPU is lost" in whole else NEEDS_RESET if "[GPU requires reset]" in whole else ""
    virtual = {"None": Virtual.NO, "Pass-Through": Virtual.PASSTHROUGH, "VGPU": Virtual.VGPU}
    action, mode = _say(gpu, "gpu_recovery_action"), _say(gpu, "gpu_virtualization_mode/virtualization_mode")
    volatile = gpu.find("ecc_errors/volatile")
    uncorrected = [] if volatile is None else [_number(each, ".") for each in volatile if "uncorrectable" in each.tag]
    known = [each for each in uncorrected if each is not None]
    rows = [_number(gpu, f"remapped_rows/remapped_row_{kind}") for kind in ("corr", "unc")]
    fabric = {each.value: each for each in Fabric}
    # Programs that only draw are none: the desktop of a laptop (tests/doctor/machines/rtx4070-laptop.xml).
    users = [each for each in gpu.findall("processes/process_info") if "C" in (_say(each, "type") or "")]
    return GpuState(
        index=index,
        error=error,
        name=_say(gpu, "product_name") or "",
        uuid=_say(gpu, "uuid") or "",
        bus=_bus(gpu.get("id", "")),
        vbios=_say(gpu, "vbios_version") or "",
        virtual=virtual.get(mode) if mode is not None else None,
        mig=_yes(gpu, "mig_mode/current_mig"),
        persistence=_yes(gpu, "persistence_mode"),
        memory_bytes=_mebibytes(gpu, "fb_memory_usage/total"),
        memory_used_bytes=_mebibytes(gpu, "fb_memory_usage/used"),
        users=tuple(
            GpuUser(
                _number(each, "pid") or 0,
                _mebibytes(each, "used_memory"),
                os.path.basename((_say(each, "process_name") or "").split(" ")[0]),
            )
            for each in users
        ),
        power_limit_w=_number(gpu, "gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit"),
        power_default_w=_number(gpu, "gpu_power_readings/default_power_limit", "power_readings/default_power_limit"),
        recovery=RECOVERY_NAMES.get(action) if action is not None else None,
        remap_pending=_yes(gpu, "remapped_rows/remapped_row_pending"),
        remap_failed=_yes(gpu, "remapped_rows/remapped_row_failure"),
        remapped=sum(each for each in rows if each is not None) if any(each is not None for each in rows) else None,
        retirement_pending=_yes(gpu, "retired_pages/pending_retirement"),
        ecc_uncorrected=sum(known) if known else None,
        sram_worn=_yes(gpu, "ecc_errors/aggregate/sram_threshold_exceeded"),
        fabric=fabric.get((_say(gpu, "fabric/state") or "").lower()),
        fabric_error=(0 if status == "Success" else 1) if (status := _say(gpu, "fabric/status")) is not None else None,
        pcie_width=_number(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width"),
        pcie_width_max=_number(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width"),
        pcie_generation_max=_number(gpu, "pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
        pcie_replays=_number(gpu, "pci/replay_counter"),
        slowdowns=_smi_slowdowns(gpu),
        celsius=_number(gpu, "temperature/gpu_temp"),
        celsius_slowdown=_number(gpu, "temperature/gpu_temp_slow_threshold"),
        sm_mhz=_number(gpu, "clocks/sm_clock"),
        sm_mhz_max=_number(gpu, "max_clocks/sm_clock"),
    )


def _smi_slowdowns(gpu: ET.Element) -> frozenset[Slowdown]:
    """The block was named clocks_throttle_reasons in drivers before 535."""
    found = set()
    for block, prefix in (
        ("clocks_event_reasons", "clocks_event_reason"),
        ("clocks_throttle_reasons", "clocks_throttle_reason"),
    ):
        found |= {each for name, each in SLOWDOWN_NAMES.items() if _say(gpu, f"{block}/{prefix}_{name}") == "Active"}
    return frozenset(found)


# --- /sys -------------------------------------------------------------------------------------------------------------


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _amd_devices(root: Path) -> Iterable[Path]:
    """The folders of AMD's GPUs that compute: integrated graphics have no such memory counters."""
    drm = root / "sys/class/drm"
    for name in _names(drm):
        device = drm / name / "device"
        is_amd = re.fullmatch(r"card\d+", name) and read_text(device / "vendor").strip() == AMD
        if is_amd and (device / "mem_info_vram_total").exists():
            yield device


def amd_gpus(root: Path = ROOT) -> tuple[GpuState, ...]:
    """AMD's GPUs, as far as the driver amdgpu shows them in /sys."""
    return tuple(_amd_gpu(index, device) for index, device in enumerate(_amd_devices(root)))


def _amd_gpu(index: int, device: Path) -> GpuState:
    sensors = [device / "hwmon" / name for name in _names(device / "hwmon")]
    ras = [re.search(r"^ue:\s*(\d+)", read_text(device / "ras" / name), re.MULTILINE) for name in _ras(device)]
    errors = [int(found[1]) for found in ras if found is not None]
    # The first sensor is at the edge of the chip. By the second one, at its junction, clocks are lowered.
    celsius, limit = _first_int(sensors, "temp2_input"), _first_int(sensors, "temp2_crit")
    power = _first_int(sensors, "power1_cap")
    default = _first_int(sensors, "power1_cap_default")
    # The file has a line for each possible clock, with a star at the present one.
    clock = re.search(r"(\d+)Mhz \*", read_text(device / "pp_dpm_sclk"), re.IGNORECASE)
    clocks = [int(each) for each in re.findall(r"(\d+)Mhz", read_text(device / "pp_dpm_sclk"), re.IGNORECASE)]
    return GpuState(
        index=index,
        name=read_text(device / "product_name").strip() or f"AMD {read_text(device / 'device').strip()}",
        uuid=read_text(device / "unique_id").strip(),
        bus=_bus(device.resolve().name),
        vbios=read_text(device / "vbios_version").strip(),
        memory_bytes=read_int(device / "mem_info_vram_total"),
        memory_used_bytes=read_int(device / "mem_info_vram_used"),
        power_limit_w=round(power / 1e6) if power else None,
        power_default_w=round(default / 1e6) if default else None,
        ecc_uncorrected=sum(errors) if errors else None,
        pcie_width=read_int(device / "current_link_width"),
        pcie_width_max=read_int(device / "max_link_width"),
        pcie_replays=read_int(device / "pcie_replay_count"),
        celsius=celsius // 1000 if celsius is not None else None,
        celsius_slowdown=limit // 1000 if limit else None,
        sm_mhz=int(clock[1]) if clock else None,
        sm_mhz_max=max(clocks, default=None),
    )


def _ras(device: Path) -> list[str]:
    return [name for name in _names(device / "ras") if name.endswith("_err_count")]


def _first_int(folders: Iterable[Path], name: str) -> int | None:
    return next((value for folder in folders if (value := read_int(folder / name)) is not None), None)


def network_ports(root: Path = ROOT) -> tuple[NetworkPort, ...]:
    """All ports of InfiniBand and RoCE adapters."""
    folder = root / "sys/class/infiniband"
    return tuple(
        _port(f"{adapter}/{number}", folder / adapter / "ports" / number)
        for adapter in _names(folder)
        for number in _names(folder / adapter / "ports")
    )


def _port(name: str, port: Path) -> NetworkPort:
    def word(file: str) -> str:
        """`ACTIVE` of `4: ACTIVE`."""
        return read_text(port / file).strip().rpartition(": ")[2]

    physical = word("phys_state")
    rate = re.match(r"[\d.]+", read_text(port / "rate"))
    return NetworkPort(
        name=name,
        ethernet=read_text(port / "link_layer").strip() == "Ethernet",
        state=word("state"),
        linked=physical == "LinkUp" if physical else None,
        rate_gbit_s=float(rate[0]) if rate else None,
        downed=read_int(port / "counters/link_downed"),
    )


# --- while a job runs -------------------------------------------------------------------------------------------------


class XidSource:
    """Waits for the XIDs that NVIDIA's driver reports. Each call may block: use it in one thread."""

    def __init__(self, nvml: Any = None) -> None:
        """Raises NVMLError, or OSError without NVML, if there are no such events."""
        nvml = nvml if nvml is not None else _own_nvml()
        if nvml is None:
            raise OSError("there is no NVML")
        self._nvml = nvml
        self._indices: dict[int, int] = {}
        nvml.nvmlInit()
        self._events = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
            except nvml.NVMLError:  # a lost GPU, or one without events: the others are watched
                continue
            self._indices[_address(handle)] = index

    @property
    def gpus(self) -> int:
        """Number of GPUs whose events come."""
        return len(self._indices)

    def wait(self, limit_ms: int) -> tuple[int | None, int] | None:
        """The next GPU, by its index, and its XID; None: none came within the limit. The index is None if the driver
        does not say which GPU it is. Raises NVMLError when the driver fails."""
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, limit_ms)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        return self._indices.get(_address(event.device)), int(event.eventData)

    def close(self) -> None:
        self._nvml.nvmlEventSetFree(self._events)
        self._nvml.nvmlShutdown()


def _address(handle: Any) -> int:
    """Handles are pointers, and each answer has a new object for the same one."""
    return handle if isinstance(handle, int) else ctypes.cast(handle, ctypes.c_void_p).value or 0


def used_memory(nvml: Any = None, root: Path = ROOT) -> dict[int, int]:
    """Bytes in use on each GPU that reports them, by its index. Quicker than the whole state."""
    nvml = (nvml if nvml is not None else _own_nvml()) if has_nvidia(root) else None
    if nvml is None:
        return {gpu.index: gpu.memory_used_bytes for gpu in amd_gpus(root) if gpu.memory_used_bytes is not None}
    found = {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                found[index] = int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index)).used)
            except nvml.NVMLError:
                continue
    finally:
        nvml.nvmlShutdown()
    return found

"""NVML with answers from a table, in the place of the module pynvml: its constants, errors and structures are real.

A machine is a table of answers by the names of NVML's functions. An answer `error:GPU_IS_LOST` is raised. What the
table does not have is NOT_SUPPORTED, as with a driver that lacks the query.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

GPU = "nvmlDevice"


def error(name: str) -> Exception:
    made: Exception = pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))
    return made


class FakeNvml:
    """Answers of one machine: `system` by function, `gpus` by function for each GPU, without `nvmlDeviceGet` in front.

    `events` are taken by nvmlEventSetWait_v2, one at a time: pairs of a GPU and an XID; those of other processes come
    from the lines of a file.
    """

    def __init__(
        self, gpus: list[Mapping[str, Any]], system: Mapping[str, Any] | None = None, file: Path | None = None
    ) -> None:
        self.gpus = [dict(each) for each in gpus]
        self.system = {"nvmlInit": 0, "nvmlSystemGetDriverVersion": "570.86.15", **(system or {})}
        self.events: list[tuple[int, int]] = []
        self.waiting = threading.Event()
        self._file = file
        self._read = 0
        """Lines of the file that were taken."""
        self.began = 0
        """Calls of nvmlInit without nvmlShutdown."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvmlDeviceGet"):
            return lambda handle, *rest: self._device(name.removeprefix("nvmlDeviceGet"), handle, rest)
        if name.startswith("nvmlSystem"):
            return lambda *rest: self._answer(self.system, name)
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:  # noqa: N802
        self._answer(self.system, "nvmlInit")
        self.began += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.began -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self._answer({"handle": 0, **self.gpus[index]}, "handle")
        return index

    # --- events

    def nvmlEventSetCreate(self) -> str:  # noqa: N802
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:  # noqa: N802
        self._answer({"events": 0, **self.gpus[handle]}, "events")

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:  # noqa: N802
        self._take_from_file()
        if not self.events:
            self.waiting.wait(min(timeout_ms, 50) / 1000)
            raise error("TIMEOUT")
        gpu, xid = self.events.pop(0)
        return SimpleNamespace(device=gpu, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=xid)

    def _take_from_file(self) -> None:
        if self._file is not None and self._file.exists():
            lines = self._file.read_text().splitlines()
            self.events += [(int(gpu), int(xid)) for gpu, xid in (line.split() for line in lines[self._read :])]
            self._read = len(lines)

    def nvmlEventSetFree(self, events: str) -> None:  # noqa: N802
        self.waiting.set()

    # --- answers

    def _answer(self, table: Mapping[str, Any], name: str) -> Any:
        value = table.get(name, "error:NOT_SUPPORTED")
        if isinstance(value, str) and value.startswith("error:"):
            raise error(value.removeprefix("error:"))
        return value

    def _device(self, name: str, handle: int, rest: tuple[Any, ...]) -> Any:
        table = self.gpus[handle]
        if "all" in table:  # every question has this answer
            return self._answer(table, "all")
        if name == "FieldValues":
            return [self._field(table, number) for number in rest[0]]
        if name == "GpuFabricInfoV":
            info = self._answer(table, name)
            rest[0]._obj.state, rest[0]._obj.status = info["state"], info.get("status", 0)
            return 0
        if name == "SramEccErrorStatus":
            rest[0]._obj.bThresholdExceeded = self._answer(table, name)
            return 0
        if name == "NvLinkState":
            states = self._answer(table, name)
            if rest[0] >= len(states):
                raise error("INVALID_ARGUMENT")
            return states[rest[0]]
        value = self._answer(table, name)
        if name == "ComputeRunningProcesses":
            return [SimpleNamespace(**{"usedGpuMemory": None, **each}) for each in value]
        return SimpleNamespace(**value) if isinstance(value, dict) else value

    def _field(self, table: Mapping[str, Any], number: int) -> Any:
        fields = table.get("fields", {})
        names = [name for name in fields if getattr(pynvml, f"NVML_FI_DEV_{name}") == number]
        if not names:
            return SimpleNamespace(nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED, valueType=0, value=None)
        value = SimpleNamespace(uiVal=fields[names[0]], ullVal=fields[names[0]])
        return SimpleNamespace(nvmlReturn=0, valueType=pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, value=value)

"""Load of the machine on which the dashboard runs: processors, memory, disk, network, GPUs.

Read by the dashboard's own process, so that a driver or a disk that hangs costs its page and never the agent.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import psutil


class OwnMachine:
    """Rates are those since the sample before."""

    def __init__(self) -> None:
        self._host = socket.gethostname().partition(".")[0]
        self._network = (0, 0)
        self._at_s = 0.0
        self._nvml: Any = None
        self._gpus: list[Any] = []
        psutil.cpu_percent(None)
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except Exception:  # noqa: BLE001 - no GPU, no driver, or one that fails: nothing is shown
            self._gpus = []

    def sample(self, folder: Path | None) -> dict[str, Any]:
        """`folder`: whose disk is shown. Bytes, bytes per second, percent."""
        memory = psutil.virtual_memory()
        try:
            usage = psutil.disk_usage(str(folder or "/"))
            disk = [usage.free, usage.total]
        except OSError:  # the folder was deleted, or its file server is gone
            disk = None
        counters, now = psutil.net_io_counters(), time.monotonic()
        network = (counters.bytes_recv, counters.bytes_sent) if counters is not None else (0, 0)
        past_s = now - self._at_s
        rates = [(new - old) / past_s if self._at_s else 0.0 for new, old in zip(network, self._network, strict=True)]
        self._network, self._at_s = network, now
        return {
            "host": self._host,
            "cores": psutil.cpu_count(),
            "cpu": psutil.cpu_percent(None),
            "memory": [memory.total - memory.available, memory.total],
            "disk": disk,
            "network": rates,
            "gpus": self._gpu_loads(),
        }

    def _gpu_loads(self) -> list[dict[str, Any]]:
        nvml, found = self._nvml, []
        try:
            for index, gpu in enumerate(self._gpus):
                memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
                found.append(
                    {
                        "index": index,
                        "load": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
                        "memory": [memory.used, memory.total],
                        "celsius": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
                    }
                )
        except Exception:  # noqa: BLE001 - NVML's own errors; its module is loaded late
            self._gpus = []  # it has fallen off the bus, or the driver is being replaced
        return found

"""The health of this machine's GPUs by its real driver: read, judged, watched, and measured with torch."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this machine has no GPU that torch can use", allow_module_level=True)

import pynvml  # noqa: E402 - where there are GPUs

from holdfast.doctor.facts import FactsRequest, GpuCheck, gpu_test  # noqa: E402
from holdfast.doctor.findings import TorchFacts, TorchState  # noqa: E402
from holdfast.doctor.gpu_full import judge_full  # noqa: E402
from holdfast.doctor.gpu_rules import examine_machine  # noqa: E402
from holdfast.doctor.machine_reader import (  # noqa: E402
    SMI,
    XidSource,
    has_gpus,
    read_machine,
    read_smi,
    used_memory,
)
from holdfast.extensions.health.freed_memory import wait_until_free  # noqa: E402
from tests.support.limits import limit_s  # noqa: E402

MS = 10
"""Limit of a wait for an event that does not come (ms)."""


def test_the_driver_reports_every_gpu_and_its_state() -> None:
    assert has_gpus()
    state = read_machine()
    assert (state.source, state.error) == ("NVML", "")
    assert state.driver
    assert len(state.gpus) >= torch.cuda.device_count()
    for gpu in state.gpus:
        assert (gpu.error, bool(gpu.name), bool(gpu.uuid)) == ("", True, True)
        assert gpu.memory_bytes is not None
        assert gpu.sm_mhz is not None


def test_nvidia_smi_says_the_same() -> None:
    by_nvml = read_machine().gpus
    by_smi = read_smi(lambda: subprocess.run(SMI, capture_output=True, text=True, check=True).stdout).gpus
    names = ("name", "uuid", "bus", "vbios", "virtual", "mig", "persistence", "power_limit_w", "recovery", "fabric")
    names += ("remap_pending", "remap_failed", "remapped", "ecc_uncorrected", "sram_worn", "pcie_width_max")
    for one, other in zip(by_nvml, by_smi, strict=True):
        differ = {
            name: (getattr(one, name), getattr(other, name))
            for name in names
            # One of them may not have the value.
            if None not in (getattr(one, name), getattr(other, name)) and getattr(one, name) != getattr(other, name)
        }
        assert differ == {}


def test_this_machine_may_train() -> None:
    state = read_machine()
    assert [each for each in examine_machine(state, state.gpus) if each.level.exit_code >= 20] == []


def test_the_driver_takes_a_watch_for_xids() -> None:
    source = XidSource(pynvml)
    assert source.gpus == len(read_machine().gpus)
    assert source.wait(MS) is None
    source.close()


def test_the_memory_of_a_killed_process_is_free_soon() -> None:
    before = used_memory()
    script = (
        "import torch\nx = torch.zeros(2**30, device='cuda')\nprint('has', flush=True)\nimport time\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "has\n"
        held = used_memory()
        assert max(held[index] - before[index] for index in before) > 2**30
        process.kill()
    freed = asyncio.run(wait_until_free(before, limit_s(30)))
    assert freed.left == {}


async def test_the_full_test_finds_no_fault() -> None:
    torch_facts = TorchFacts(state=TorchState.OK, gpus=torch.cuda.device_count())
    asked = FactsRequest(sys.executable, 1, 1, None, None, False, os.environ, 60.0, GpuCheck.FULL, limit_s(120))
    found = await gpu_test(asked, torch_facts)
    assert found is not None
    assert (found.kind, found.error) == ("cuda", "")
    assert [each.why for each in judge_full(found) if each.level.exit_code >= 20] == []

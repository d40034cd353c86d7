"""What the GPUs of a node compute: the rules, and the program that measures, on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.doctor.facts import FactsRequest, GpuCheck, gpu_test
from holdfast.doctor.findings import DoctorFinding, Level, TorchFacts, TorchState
from holdfast.doctor.gpu_full import full_traits, judge_full
from holdfast.doctor.machine_state import DeviceMeasure, FullMeasure, ReduceMeasure
from holdfast.doctor.majority import differences

H100 = {"name": "NVIDIA H100 80GB HBM3", "tflops": 700.0, "digests": ("0a1b",)}
H100 |= {"to_device_bytes_s": 55e9, "to_host_bytes_s": 55e9, "device_bytes_s": 1.4e12}


def node(
    count: int = 8,
    odd: int = 3,
    reduce: ReduceMeasure | None = None,
    around: ReduceMeasure | None = None,
    **changed: Any,
) -> FullMeasure:
    """A node of which one GPU differs like this."""
    devices = tuple(DeviceMeasure(index=n, **(H100 | (changed if n == odd else {}))) for n in range(count))
    return FullMeasure(kind="cuda", devices=devices, reduce=reduce, reduce_without_p2p=around)


def problems(full: FullMeasure) -> list[DoctorFinding]:
    return [each for each in judge_full(full) if each.level is not Level.PASS]


@pytest.mark.parametrize(
    ("full", "level", "text"),
    [
        (node(digests=("0a1b", "ffff")), Level.FATAL, "GPU 3: the same product has different bits each time"),
        (node(digests=("ffff",)), Level.FATAL, "GPU 3: a product has other bits than on the others"),
        (node(2, 1, digests=("ffff",)), Level.FATAL, "GPU 0, GPU 1: a product has other bits"),
        (node(error="CUDA error: uncorrectable ECC error encountered"), Level.FATAL, "GPU 3 fails: CUDA error"),
        (node(tflops=500.0), Level.WARN, "GPU 3 computes at 500 TFLOP/s, the median is 700 TFLOP/s"),
        (node(to_device_bytes_s=12e9), Level.WARN, "GPU 3 copies from the host at 96 Gbit/s"),
        (node(to_host_bytes_s=6e9), Level.WARN, "GPU 3 copies to the host at 48 Gbit/s"),
        (node(device_bytes_s=1e12), Level.WARN, "GPU 3 copies in its memory"),
        (node(reduce=ReduceMeasure(error="unhandled system error")), Level.FATAL, "fails: unhandled system error"),
        (
            node(reduce=ReduceMeasure(error="it did not end within 60 s"), around=ReduceMeasure(bytes_s=5e9)),
            Level.FATAL,
            "works with NCCL_P2P_DISABLE=1: it did not end within 60 s",
        ),
        (FullMeasure(error="torch cannot be imported"), Level.WARN, "it was not made: torch cannot be imported"),
    ],
)
def test_the_gpu_that_is_wrong_or_slow_is_named(full: FullMeasure, level: Level, text: str) -> None:
    (found,) = problems(full)
    assert found.level is level
    assert text in found.why


@pytest.mark.parametrize(
    "full",
    [
        node(),
        node(1, 0, tflops=20.0),
        node(tflops=650.0, to_device_bytes_s=45e9),
        node(name="NVIDIA A100-SXM4-80GB", digests=("ffff",), tflops=250.0),  # another model has other bits
        node(reduce=ReduceMeasure(bytes_s=3e11), around=ReduceMeasure(error="no shared memory")),
    ],
)
def test_a_node_without_a_fault_has_no_finding(full: FullMeasure) -> None:
    assert problems(full) == []
    assert any("equal bits each time" in each.why for each in judge_full(full))


def test_a_node_that_is_slower_than_the_median_of_all_is_named() -> None:
    speeds = {"a": 700.0, "b": 690.0, "c": 540.0, "d": 710.0}
    traits = {name: full_traits(node(1, 0, tflops=speed)) | {"gpu": "H100"} for name, speed in speeds.items()}
    (found,) = differences(traits)
    assert (found.node, found.text) == (
        "c",
        "has 540 TFLOP/s on its slowest GPU, the median is 695 TFLOP/s on its slowest GPU",
    )
    assert full_traits(node(error="lost")) == {}


# --- the program -------------------------------------------------------------------------------------------------------

GPUS = TorchFacts(state=TorchState.OK, gpus=2)


def request(python: str, gpu: GpuCheck = GpuCheck.FULL, limit_s: float = 60.0) -> FactsRequest:
    return FactsRequest(python, 1, 1, None, None, False, {}, 30.0, gpu, limit_s)


def program(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("exit 3", "its process ended with 3"),
        ("sleep 60", "it did not end within 0.5 s"),
        ("echo '{\"kind\": 5}'", "an odd answer"),
    ],
)
async def test_a_program_that_fails_is_a_reason_and_no_fault_of_the_node(body: str, text: str, tmp_path: Path) -> None:
    found = await gpu_test(request(program(tmp_path, body), limit_s=0.5 if "sleep" in body else 60.0), GPUS)
    assert found is not None
    assert text in found.error


async def test_it_is_asked_for_gpus_where_torch_has_some(tmp_path: Path) -> None:
    python = program(tmp_path, """echo '{"kind": "'$3'", "devices": []}'""")
    found = await gpu_test(request(python), GPUS)
    assert found == FullMeasure(kind="cuda")
    assert await gpu_test(request(python), TorchFacts(state=TorchState.OK)) == FullMeasure(kind="cpu")
    assert await gpu_test(request(python, GpuCheck.FULL_IF_ANY), TorchFacts(state=TorchState.OK)) is None
    assert await gpu_test(request(python, GpuCheck.QUICK), GPUS) is None
    assert await gpu_test(request(sys.executable), TorchFacts(state=TorchState.BROKEN)) == FullMeasure(
        error="torch cannot be imported"
    )

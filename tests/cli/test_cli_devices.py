"""Counting devices over trees and lists that look like other machines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.cli.devices import Count, Probes, ask_torch, count_listed, count_processes, has_infiniband, nvml_uuids
from holdfast.cli.resolve import preflight_level
from holdfast.protocol.errors import ProcessesError

UUIDS = ["GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333", "GPU-cccc4444"]


def no_torch(name: str) -> int:
    raise AssertionError(f"torch was asked for {name}")


def probes(root: Path, uuids: list[str] | None = None) -> Probes:
    return Probes(root=str(root), nvml=lambda: uuids, torch=no_torch, backends=lambda _: True, cpus=6)


def amd(root: Path, simd_counts: list[int]) -> None:
    for index, count in enumerate(simd_counts):
        node = root / "sys/class/kfd/kfd/topology/nodes" / str(index)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {count}\n")


def nvidia(root: Path, names: list[str]) -> None:
    (root / "dev").mkdir()
    for name in names:
        (root / "dev" / name).touch()


@pytest.mark.parametrize(
    ("listed", "number"),
    [
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("0,1,2,3", 4),
        (" 3 , 1 ", 2),
        ("0,9,1", 1),
        ("0,-1,1", 1),
        ("0,x,1", 1),
        ("1x,2", 2),
        ("1,1", 0),
        ("NoDevFiles", 0),
        ("GPU-aaaa1111,GPU-cccc", 2),
        ("GPU-aaaa,GPU-cccc", 0),
        ("GPU-cccc,GPU-dddd,GPU-bbbb", 1),
        ("GPU-cccc,GPU-cccc4", 0),
        ("GPU-cccc,1", 1),
        ("MIG-1,MIG-2", 1),
    ],
)
def test_cuda_visible_devices(listed: str, number: int) -> None:
    assert count_listed(listed, 4, UUIDS) == number


def test_uuids_are_believed_when_there_is_nothing_to_compare_with() -> None:
    assert count_listed("GPU-x,GPU-y", 4, []) == 2
    assert count_listed("GPU-x,GPU-x", 4, []) == 0
    assert count_listed("GPU-x,GPU-y,GPU-z", 2, []) == 2


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("12", 12), (" 3 ", 3)])
def test_a_number_is_a_number(text: str, number: int, tmp_path: Path) -> None:
    assert count_processes(text, {}, probes(tmp_path)) == Count(number, "workers", "given")


def test_a_node_without_accelerator(tmp_path: Path) -> None:
    assert count_processes("auto", {}, probes(tmp_path)) == Count(6, "cpu", "affinity mask")
    assert count_processes("cpu", {}, probes(tmp_path)) == Count(6, "cpu", "affinity mask")
    with pytest.raises(ProcessesError, match="this node has no GPU"):
        count_processes("gpu", {}, probes(tmp_path))


def test_nvml_is_asked_first(tmp_path: Path) -> None:
    nvidia(tmp_path, ["nvidia0", "nvidiactl", "nvidia-uvm"])
    assert count_processes("gpu", {}, probes(tmp_path, UUIDS)) == Count(4, "gpu", "NVML")
    seen = {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert count_processes("auto", seen, probes(tmp_path, UUIDS)).number == 2
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert count_processes("auto", hidden, probes(tmp_path, UUIDS)).kind == "cpu"
    with pytest.raises(ProcessesError, match=r"0 of 4 by NVML and CUDA_VISIBLE_DEVICES="):
        count_processes("gpu", hidden, probes(tmp_path, UUIDS))


def test_device_files_without_nvml(tmp_path: Path) -> None:
    nvidia(tmp_path, ["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps", "tty0"])
    assert count_processes("gpu", {}, probes(tmp_path)) == Count(3, "gpu", "/dev/nvidia*")


def test_amd(tmp_path: Path) -> None:
    amd(tmp_path, [0, 304, 304])
    assert count_processes("auto", {}, probes(tmp_path)) == Count(2, "gpu", "/sys/class/kfd")
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        assert count_processes("gpu", {name: "1"}, probes(tmp_path)).number == 1


@pytest.mark.parametrize("text", ["0", "-1", "-8"])
def test_not_positive(text: str, tmp_path: Path) -> None:
    with pytest.raises(ProcessesError, match="at least 1"):
        count_processes(text, {}, probes(tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("AUTO", "did you mean auto"),
        ("Gpu", "did you mean gpu"),
        ("gpus", "did you mean gpu"),
        ("cuda", "did you mean gpu"),
        ("mps", "did you mean auto"),
        ("hpu", "did you mean auto"),
        ("", "must be a number"),
        ("two", "did you mean 2"),
        ("Ten", "did you mean 10"),
        ("1.5", "must be a number"),
        ("2 4", "must be a number"),
    ],
)
def test_typing_errors_do_not_ask_torch(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ProcessesError, match=problem):
        count_processes(text, {}, probes(tmp_path))


@pytest.mark.parametrize("name", ["xpu", "npu"])
def test_other_names_are_torchs_to_count(name: str, tmp_path: Path) -> None:
    asked: list[str] = []

    def torch(kind: str) -> int:
        asked.append(kind)
        return 3

    assert count_processes(name, {}, probes(tmp_path)._replace(torch=torch)) == Count(3, name, "torch")
    assert asked == [name]
    with pytest.raises(ProcessesError, match=f"torch finds no {name} device"):
        count_processes(name, {}, probes(tmp_path)._replace(torch=lambda _: 0))


@pytest.mark.parametrize("name", ["eleven", "many", "tpu", "all"])
def test_torch_is_not_asked_for_what_no_package_can_have_told_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(ProcessesError, match="no package here gives torch another backend"):
        count_processes(name, {}, probes(tmp_path)._replace(backends=None))


def fake_python(tmp_path: Path, body: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_what_torch_says(tmp_path: Path) -> None:
    assert ask_torch("npu", fake_python(tmp_path, "echo 4")) == 4
    with pytest.raises(ProcessesError, match=r"^not a number, auto, gpu, cpu or xpu, .*: No module named 'torch'"):
        ask_torch("npu", fake_python(tmp_path, "echo trace >&2; echo \"No module named 'torch'\" >&2; exit 1"))
    with pytest.raises(ProcessesError, match="does not run: No such file"):
        ask_torch("npu", str(tmp_path / "missing"))


# --- NVML ---------------------------------------------------------------------------------------------------------------


class FakeNvml(ModuleType):
    """nvidia-ml-py on a machine with these GPUs, by UUID; None: one that does not tell its own."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus: Sequence[str | None] | None) -> None:
        super().__init__("pynvml")
        self._gpus = gpus
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802 - the library's names
        if self._gpus is None:
            raise self.NVMLError("no driver")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._gpus or ())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        uuid = (self._gpus or ())[handle]
        if uuid is None:
            raise self.NVMLError("not supported")
        return uuid


@pytest.mark.parametrize(
    ("gpus", "uuids"), [(["GPU-a", None], ["GPU-a", ""]), ([], []), (None, None)], ids=["gpus", "no GPU", "no driver"]
)
def test_nvml_is_closed_again(
    gpus: list[str | None] | None, uuids: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml(gpus)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvml_uuids() == uuids
    assert nvml.open == 0


def test_without_the_library_nobody_complains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_uuids() is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert count_processes("gpu", {}, Probes(root=str(tmp_path))) == Count(1, "gpu", "/dev/nvidia*")


@pytest.mark.parametrize(
    ("given", "kind", "files", "level"),
    [
        ("auto", "workers", [], "off"),
        ("auto", "workers", ["dev/nvidia0"], "quick"),
        ("auto", "gpu", [], "quick"),
        ("auto", "cpu", ["dev/nvidia0"], "off"),  # the workers leave the GPUs alone
        ("off", "gpu", ["dev/nvidia0"], "off"),
        ("full", "workers", [], "full"),
    ],
)
def test_a_node_whose_workers_use_gpus_is_checked_of_itself(
    given: str, kind: str, files: list[str], level: str, tmp_path: Path
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    assert preflight_level(given, Count(2, kind, "given"), Probes(root=str(tmp_path))) == level


def test_infiniband_is_found_by_its_adapters(tmp_path: Path) -> None:
    assert not has_infiniband(Probes(root=str(tmp_path)))
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert has_infiniband(Probes(root=str(tmp_path)))

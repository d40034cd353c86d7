"""CPU binding on machines made of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from holdfast.protocol.errors import BindingError
from holdfast.protocol.options import CommandKind, Endpoint, LogOptions, RunOptions, WorkerCommand
from holdfast.protocol.policy import JobSpec, Limits
from holdfast.supervisor.worker_command import (
    NumaTopology,
    accelerators,
    amd_gpus,
    binding_for,
    cpus_for,
    nvidia_gpus,
    parse_cpu_list,
    visible_gpus,
)
from tests.support.tables import tables

TABLES = tables(__file__)


class FakeMachine:
    """Two sockets of two nodes of four cores with two threads each: CPU c and c+16 share a core, pairs of cores a cache."""

    cores = 16
    cores_per_node = 4

    def __init__(self, root: Path, gpus_on: tuple[int, ...] = ()) -> None:
        self.root = root
        for node in range(4):
            first = node * self.cores_per_node
            last = first + self.cores_per_node - 1
            self.put(f"devices/system/node/node{node}/cpulist", f"{first}-{last},{first + 16}-{last + 16}\n")
        for cpu in range(2 * self.cores):
            core = cpu % self.cores
            self.put(f"devices/system/cpu/cpu{cpu}/topology/physical_package_id", f"{core // 8}\n")
            self.put(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{core},{core + 16}\n")
            pair = core // 2 * 2
            for index, (level, kind, shared) in enumerate(
                [
                    (1, "Data", f"{core},{core + 16}"),
                    (3, "Unified", f"{pair}-{pair + 1},{pair + 16}-{pair + 17}"),
                    (9, "Instruction", "0"),
                ]
            ):
                for name, text in (("level", level), ("type", kind), ("shared_cpu_list", shared)):
                    self.put(f"devices/system/cpu/cpu{cpu}/cache/index{index}/{name}", f"{text}\n")
        self.gpus = tuple(f"0000:{gpu:02x}:00.0" for gpu in range(len(gpus_on)))
        for address, node in zip(self.gpus, gpus_on, strict=True):
            self.put(f"bus/pci/devices/{address}/numa_node", f"{node}\n")

    def put(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def seen(self, allowed: set[int] | None = None) -> NumaTopology:
        cpus = frozenset(range(2 * self.cores)) if allowed is None else frozenset(allowed)
        return NumaTopology(sys=self.root, allowed=cpus, gpus=self.gpus)


def cpus(text: str) -> list[int]:
    return sorted(parse_cpu_list(text))


@pytest.mark.parametrize(("mode", "rank", "expected"), TABLES["by_gpu"])
def test_by_gpu(tmp_path: Path, mode: str, rank: int, expected: str) -> None:
    machine = FakeMachine(tmp_path, gpus_on=(0, 0, 2, -1)).seen()
    assert cpus_for(mode, rank, 4, machine) == cpus(expected)


@pytest.mark.parametrize(
    ("mode", "nproc", "expected"),
    [
        ("node", 4, ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]),
        ("node", 2, ["0-3,16-19", "8-11,24-27"]),
        ("socket", 2, ["0-7,16-23", "8-15,24-31"]),
        ("exclusive", 8, ["0-1,16-17", "2-3,18-19", "4-5,20-21", "6-7,22-23"]),
        ("core-complex", 8, ["0-1,16-17", "2-3,18-19"]),
    ],
)
def test_without_gpus_ranks_are_dealt_over_the_nodes(
    tmp_path: Path, mode: str, nproc: int, expected: list[str]
) -> None:
    machine = FakeMachine(tmp_path).seen()
    assert [cpus_for(mode, rank, nproc, machine) for rank in range(len(expected))] == [cpus(text) for text in expected]


def test_exclusive_shares_no_cpu_and_uses_all(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path).seen()
    shares = [cpus_for("exclusive", rank, 7, machine) for rank in range(7)]
    assert sorted(cpu for share in shares for cpu in share) == list(range(32))


def test_only_cpus_that_may_be_used(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    assert cpus_for("node", 0, 1, fake.seen({1, 2, 30})) == [1, 2]
    assert cpus_for("node", 1, 2, fake.seen({1, 2, 30})) == [30]
    assert cpus_for("socket", 0, 1, fake.seen({1, 6, 30})) == [1, 6]
    # Of the two caches of node 0 the one with more CPUs left comes first.
    assert cpus_for("core-complex", 0, 1, fake.seen({1, 2, 3})) == [2, 3]


@pytest.mark.parametrize(
    ("mode", "rank", "nproc", "gpus", "allowed", "words"),
    [
        ("nodes", 0, 1, (), None, "unknown; there are: node, socket"),
        ("node", 2, 3, (0, 1), None, "local rank 2 has no accelerator of its own; workers see 2"),
        ("exclusive", 0, 20, (), None, "4 usable cores for 5 workers"),
        ("node", 0, 1, (3,), {0}, "no CPU of NUMA node 3"),
        ("socket", 0, 1, (3,), {0}, "no CPU of NUMA node 3"),
        ("node", 0, 1, (), set(), "no NUMA node has a CPU"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, mode: str, rank: int, nproc: int, gpus: tuple[int, ...], allowed: set[int] | None, words: str
) -> None:
    with pytest.raises(BindingError, match=words):
        cpus_for(mode, rank, nproc, FakeMachine(tmp_path, gpus).seen(allowed))


def test_a_machine_that_does_not_tell(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    (tmp_path / "devices/system/cpu/cpu0/topology/thread_siblings_list").unlink()
    with pytest.raises(BindingError, match="the layout of this machine cannot be read"):
        cpus_for("exclusive", 0, 1, fake.seen())


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "abc"), ("", ""), ("2, 0", "ca"), ("1,9,0", "b"), ("0,-1,1", "a"), ("GPU-5d2f,1", "abc"), ("x", "")],
)
def test_visible_gpus(visible: str | None, expected: str) -> None:
    assert visible_gpus(tuple("abc"), visible) == tuple(expected)


def test_gpus_of_the_driver(tmp_path: Path) -> None:
    for minor, name in enumerate(("0000:DC:00.0", "0000:1a:00.0", "0000:3b:00.0")):
        (tmp_path / "gpus" / name).mkdir(parents=True)
        (tmp_path / "gpus" / name / "information").write_text(f"Model: \t\t H200\nDevice Minor: \t {minor}\n")
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").touch()
    assert nvidia_gpus(tmp_path / "gpus", tmp_path) == ("0000:1a:00.0", "0000:dc:00.0")
    assert nvidia_gpus(tmp_path / "absent", tmp_path) == ()


def test_binding_of_all_workers(tmp_path: Path) -> None:
    options = RunOptions(
        job=JobSpec(run_id="x", min_nodes=1, max_nodes=1, backend="c10d"),
        limits=Limits(),
        nproc=2,
        command=WorkerCommand(kind=CommandKind.SCRIPT, target="t.py"),
        logs=LogOptions(log_dir=None),
        endpoint=Endpoint(host="localhost", port=0),
    )
    machine = FakeMachine(tmp_path).seen()
    assert binding_for(options, machine) == {}
    bound = structs.replace(options, numa_binding="node")
    assert binding_for(bound, machine) == {0: cpus("0-3,16-19"), 1: cpus("8-11,24-27")}


def test_the_machine_we_are_on() -> None:
    machine = NumaTopology.this({})
    assert set(cpus_for("node", 0, 1, machine)) <= machine.allowed


def test_amds_accelerators_are_bound_as_nvidias_are(tmp_path: Path) -> None:
    for index, (simd_count, location) in enumerate([(0, 0), (304, 0xC100), (304, 0x2308)]):
        node = tmp_path / "class/kfd/kfd/topology/nodes" / str(index)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"simd_count {simd_count}\nlocation_id {location}\ndomain 1\nname gfx942\n")
    assert amd_gpus(tmp_path) == ("0001:c1:00.0", "0001:23:01.0")
    assert amd_gpus(tmp_path / "none") == ()


class FakeDevices:
    """Folders that look like a machine's /sys, /dev and its NVIDIA driver's list."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, address: str, what: str, *, driver: str = "", tiles: tuple[str, ...] = (), node: str = "") -> None:
        """`what`: class and vendor; `node`: the name of its file in /dev/dri."""
        device = self.root / "bus/pci/devices" / address
        for path in (device, *(device / tile for tile in tiles), *([device / "drm" / node] if node else [])):
            path.mkdir(parents=True)
        for name, text in zip(("class", "vendor"), what.split(), strict=True):
            (device / name).write_text(f"{text}\n")
        if driver:
            (self.root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (device / "driver").symlink_to(self.root / "drivers" / driver)
        if node:
            (self.root / "dev/dri").mkdir(parents=True, exist_ok=True)
            (self.root / "dev/dri" / node).touch()

    def seen(self, **environment: str) -> tuple[str, ...]:
        folders: dict[str, Any] = {"sys": self.root, "proc_gpus": self.root / "gpus", "dev": self.root / "dev"}
        return accelerators(environment, **folders)


INTEL_CARD, INTEL_INSIDE, OF_ANOTHER_MAKER = "0x038000 0x8086", "0x030000 0x8086", "0x030000 0x1a03"
COMPUTES = "0x120000 0x1da3"


@pytest.fixture
def devices(tmp_path: Path) -> FakeDevices:
    return FakeDevices(tmp_path)


def test_intels_cards_count_once_for_each_tile(devices: FakeDevices) -> None:
    devices.add("0000:00:02.0", INTEL_INSIDE, node="renderD128")
    devices.add("0000:9a:00.0", INTEL_CARD, node="renderD130", tiles=("tile0", "tile1"))
    devices.add("0000:3b:00.0", INTEL_CARD, node="renderD129", tiles=("drm/card1/gt/gt0", "drm/card1/gt/gt1"))
    devices.add("0000:05:00.0", OF_ANOTHER_MAKER, node="renderD131")
    devices.add("0000:9b:00.0", INTEL_CARD)  # another container's: no file in /dev/dri
    tiles = ("0000:3b:00.0", "0000:3b:00.0", "0000:9a:00.0", "0000:9a:00.0")
    assert devices.seen() == tiles
    assert devices.seen(ZE_FLAT_DEVICE_HIERARCHY="FLAT", CUDA_VISIBLE_DEVICES="0") == tiles
    assert devices.seen(ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE") == ("0000:3b:00.0", "0000:9a:00.0")


def test_what_is_inside_the_processor_counts_where_there_is_no_card(devices: FakeDevices) -> None:
    devices.add("0000:00:02.0", INTEL_INSIDE, node="renderD128", tiles=("drm/card0/gt/gt0", "drm/card0/gt/gt1"))
    assert devices.seen() == ("0000:00:02.0",), "the second is for video"


@pytest.mark.parametrize(("mask", "hierarchy", "buses"), TABLES["level_zero"])
def test_the_mask_of_level_zero(devices: FakeDevices, mask: str, hierarchy: str, buses: list[str]) -> None:
    devices.add("0000:3b:00.0", INTEL_CARD, node="renderD128", tiles=("tile0", "tile1"))
    devices.add("0000:9a:00.0", INTEL_CARD, node="renderD129", tiles=("tile0", "tile1"))
    seen = devices.seen(ZE_AFFINITY_MASK=mask, ZE_FLAT_DEVICE_HIERARCHY=hierarchy)
    assert seen == tuple(f"0000:{bus}:00.0" for bus in buses)


def test_other_devices_that_compute(devices: FakeDevices) -> None:
    assert devices.seen() == ()
    devices.add("0000:b3:00.0", COMPUTES, driver="habanalabs")
    devices.add("0000:4d:00.0", COMPUTES, driver="habanalabs")
    devices.add("0000:4e:00.0", COMPUTES)  # given to a virtual machine
    devices.add("0000:00:0b.0", "0x120000 0x8086", driver="intel_vpu")
    devices.add("0000:05:00.0", OF_ANOTHER_MAKER, driver="ast")
    assert devices.seen() == ("0000:4d:00.0", "0000:b3:00.0")


def test_ranks_of_one_cards_tiles_share_its_node(tmp_path: Path) -> None:
    fake, devices = FakeMachine(tmp_path), FakeDevices(tmp_path)
    for bus, node in (("3b", 1), ("9a", 3)):
        address = f"0000:{bus}:00.0"
        devices.add(address, INTEL_CARD, node=f"renderD{128 + node}", tiles=("tile0", "tile1"))
        fake.put(f"bus/pci/devices/{address}/numa_node", f"{node}\n")
    machine = structs.replace(fake.seen(), gpus=devices.seen())
    assert cpus_for("node", 3, 4, machine) == cpus("12-15,28-31")
    assert [cpus_for("exclusive", rank, 4, machine) for rank in (0, 1)] == [cpus("4-5,20-21"), cpus("6-7,22-23")]

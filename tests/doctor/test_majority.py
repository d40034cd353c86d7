"""Nodes that differ from most others, and pairs of nodes that are slow."""

from __future__ import annotations

import random

import pytest

from holdfast.doctor.machine_state import GpuState, MachineState, NetworkPort
from holdfast.doctor.majority import Weight, differences, profile
from holdfast.doctor.slow_pairs import Pair, first_round, judge, second_round

H100 = GpuState(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    vbios="96.00.74.00.09",
    mig=False,
    persistence=True,
    memory_bytes=85520809984,
    power_limit_w=700,
    links_active=18,
    pcie_width=16,
    pcie_generation_max=5,
)
PORTS = tuple(
    NetworkPort(name=f"mlx5_{number}/1", state="ACTIVE", linked=True, rate_gbit_s=400.0) for number in range(8)
)


def node(
    count: int = 8, ports: tuple[NetworkPort, ...] = PORTS, nic: int = 25000, driver: str = "570.86", **changed: object
) -> dict[str, str]:
    gpus = tuple(
        GpuState(**{**{name: getattr(H100, name) for name in H100.__struct_fields__}, "index": n}) for n in range(count)
    )
    if changed:
        fields = {name: getattr(H100, name) for name in H100.__struct_fields__} | {"index": count - 1} | changed
        gpus = (*gpus[:-1], GpuState(**fields))
    return profile(MachineState(source="NVML", driver=driver, gpus=gpus, ports=ports), gpus, nic)


ODD = [
    ({"count": 7}, "has 7 GPUs, 3 of 4 nodes have 8 GPUs", Weight.SLOWS),
    ({"memory_bytes": 40 << 30}, "has GPUs with 40 GiB", Weight.SLOWS),
    ({"links_active": 17}, "has 17 active NVLinks per GPU", Weight.SLOWS),
    ({"pcie_width": 8}, "has 8 PCIe lanes per GPU", Weight.SLOWS),
    ({"pcie_generation_max": 4}, "has PCIe 4", Weight.SLOWS),
    ({"power_limit_w": 500}, "has a power limit of 500 W", Weight.SLOWS),
    ({"ports": PORTS[:7]}, "has 7 active InfiniBand ports", Weight.SLOWS),
    ({"nic": 1000}, "has a network of 1000 Mbit/s, 3 of 4 nodes have a network of 25000 Mbit/s", Weight.SLOWS),
    ({"driver": "550.54"}, "has driver 550.54", Weight.NOTE),
    ({"vbios": "96.00.30.00.01"}, "has VBIOS 96.00.30.00.01, 96.00.74.00.09", Weight.NOTE),
    ({"persistence": False}, "has persistence off, on", Weight.NOTE),
]


@pytest.mark.parametrize(("odd", "text", "weight"), ODD)
def test_the_node_that_differs_is_named_with_its_difference(odd: dict[str, object], text: str, weight: Weight) -> None:
    (found,) = differences({"a": node(), "b": node(), "c": node(**odd), "d": node()})  # type: ignore[arg-type]
    assert (found.node, found.weight) == ("c", weight)
    assert text in found.text


@pytest.mark.parametrize(
    "nodes",
    [
        [node(), node(), node()],
        [node(), node(count=4)],  # of two nodes none is the usual one
        [node(), node(), node(count=4), node(count=4)],
        [node(), node(), node(power_limit_w=699)],
        [node(), node(), {}],  # nothing is known of the third
        [node(), node(), node(memory_bytes=None, power_limit_w=None, links_active=None)],
        [node(count=0), node(count=0), node(count=0)],
    ],
)
def test_nodes_without_a_known_difference_are_not_named(nodes: list[dict[str, str]]) -> None:
    assert list(differences(dict(zip("abcd", nodes, strict=False)))) == []


def test_more_than_the_others_have_is_no_difference() -> None:
    assert list(differences({"a": node(4), "b": node(4), "c": node(8)})) == []


def test_gpus_of_another_model_are_compared_with_their_own() -> None:
    """Three nodes with A100 among five with H100: their limits are not too low, but one of them has a GPU less."""
    a100 = {"name": "NVIDIA A100-SXM4-80GB", "power_limit_w": 400}

    def older(count: int) -> dict[str, str]:
        gpus = tuple(GpuState(index=n, **a100) for n in range(count))  # type: ignore[arg-type]
        return profile(MachineState(source="NVML", gpus=gpus, ports=PORTS), gpus)

    found = list(differences({**{f"h{n}": node() for n in range(5)}, "a1": older(8), "a2": older(8), "a3": older(7)}))
    slower = {(each.node, each.trait) for each in found if each.weight is Weight.SLOWS}
    assert slower == {("a3", "gpus")}
    assert {(each.node, each.trait) for each in found if each.weight is Weight.NOTE} == {
        ("a1", "gpu"),
        ("a2", "gpu"),
        ("a3", "gpu"),
    }


def test_a_value_that_is_no_number_is_no_difference() -> None:
    assert list(differences({"a": {"gpus": "8"}, "b": {"gpus": "8"}, "c": {"gpus": "eight"}})) == []


# --- pairs -------------------------------------------------------------------------------------------------------------


def measured(pairs: tuple[Pair, ...], seed: random.Random, node: int | None, link: Pair | None) -> dict[Pair, float]:
    """Rates of 50 GB/s with a noise of 2 %; a slow node has 70 % of that, a slow link 60 %."""

    def rate(pair: Pair) -> float:
        share = 0.7 if node in pair else 0.6 if pair == link else 1.0
        return 50e9 * share * seed.gauss(1.0, 0.02)

    return {pair: rate(pair) for pair in pairs}


def two_rounds(
    number: int, *, nodes: int = 8, node: int | None = None, link: Pair | None = None
) -> list[tuple[int, ...]]:
    seed = random.Random(number)
    first = measured(first_round(nodes), seed, node, link)
    second = measured(second_round(nodes, first), seed, node, link)
    assert len(second) <= nodes // 2
    assert not set(first) & set(second)
    return [each.nodes for each in judge({**first, **second})]


@pytest.mark.parametrize("number", range(20))
def test_one_slow_node_among_eight_is_named_after_two_rounds(number: int) -> None:
    assert two_rounds(number, node=number % 8) == [(number % 8,)]


@pytest.mark.parametrize("number", range(20))
def test_one_slow_link_between_two_that_were_paired_is_named_after_two_rounds(number: int) -> None:
    link = first_round(8)[number % 4]
    assert two_rounds(number, link=link) == [link]


@pytest.mark.parametrize("number", range(20))
def test_of_all_pairs_any_slow_link_among_eight_is_named(number: int) -> None:
    pairs = tuple((one, other) for one in range(8) for other in range(one + 1, 8))
    link = pairs[number]
    assert [each.nodes for each in judge(measured(pairs, random.Random(number), None, link))] == [link]


def test_no_healthy_node_is_named_in_a_hundred_jobs() -> None:
    assert [two_rounds(number) for number in range(100)] == [[]] * 100


def test_both_nodes_of_a_pair_are_named_if_both_are_slow() -> None:
    seed = random.Random(1)
    first = measured(first_round(8), seed, None, None) | {(2, 3): 30e9}
    second = {pair: 30e9 if {2, 3} & set(pair) else 50e9 for pair in second_round(8, first)}
    assert {each.nodes for each in judge({**first, **second})} == {(2,), (3,)}


def test_two_nodes_alone_have_no_usual_rate() -> None:
    assert two_rounds(0, nodes=2, node=1) == []

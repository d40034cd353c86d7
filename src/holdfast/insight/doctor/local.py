"""One node's checks: all of them, in the order in which they are shown. PURE: facts in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.core.doctor import DoctorFinding, LocalFacts
from holdfast.insight.doctor import machine, network, software

Check = Callable[[LocalFacts], Iterator[DoctorFinding]]

CHECKS: tuple[Check, ...] = (
    software.python,
    software.torch,
    software.cuda,
    software.gpu_health,
    software.gpu_use,
    machine.shared_memory,
    machine.open_files,
    machine.processes,
    machine.locked_memory,
    machine.core_dumps,
    machine.memory,
    machine.cpus,
    machine.overcommit,
    machine.tracing,
    machine.folders,
    software.threads,
    machine.clock,
    network.own_name,
    network.interfaces,
    network.chosen_interfaces,
    network.ports,
    network.endpoint_port,
    software.variables,
)


def examine(facts: LocalFacts) -> tuple[DoctorFinding, ...]:
    """Every check's findings; each gives one at least, if it has anything to look at."""
    return tuple(finding for check in CHECKS for finding in check(facts))

"""Checks of names, interfaces and ports, as far as one node can know. PURE."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.doctor import DoctorFinding, Interface, LocalFacts
from holdfast.insight.doctor.making import fatal, named, passed, retry, warn
from holdfast.text import is_loopback

RESOLVE_SLOW_S = 2.0
EPHEMERAL_PORTS_MIN = 4096
CHOOSERS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

BRIDGES = (
    *("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "cilium", "lxc", "lxd", "podman", "kube"),
    *("weave", "tailscale", "zt", "tun", "tap", "vmnet", "dummy", "nerdctl", "ovs", "genev", "vxlan"),
)
"""Beginnings of names: interfaces of containers, virtual machines and tunnels, which seldom lead to other nodes."""


def own_name(facts: LocalFacts) -> Iterator[DoctorFinding]:
    """gloo takes the address of the host name, and loopback when that is not an address of this machine."""
    what, host = "own name", facts.host
    alone = stays_here(facts)
    choose = f"set GLOO_SOCKET_IFNAME={proposed(facts) or 'INTERFACE'}, or write `ADDRESS {host}` into /etc/hosts"
    if "GLOO_SOCKET_IFNAME" in facts.variables:
        yield passed("HF531", what, f"{host} (GLOO_SOCKET_IFNAME is set, so it matters little)")
    elif facts.resolve_error:
        why = f"{host} does not resolve: {facts.resolve_error}"
        yield passed("HF531", what, why) if alone else warn("HF531", what, why, choose)
    elif facts.own_addresses and all(is_loopback(address) for address in facts.own_addresses):
        why = f"{host} is {named(facts.own_addresses)}, a loopback address"
        if alone:
            yield passed("HF532", what, f"{why}: good for one node, not for several")
        else:
            yield warn("HF532", what, f"{why}: gloo would announce it to the other nodes", choose)
    elif facts.resolve_s > RESOLVE_SLOW_S:
        yield warn(
            "HF531", what, f"{host} took {facts.resolve_s:.1f} s to resolve", "write it into /etc/hosts, or mend DNS"
        )
    else:
        yield passed("HF531", what, f"{host} is {named(facts.own_addresses)}")


def interfaces(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "interfaces"
    able = candidates(facts)
    if not able:
        if not stays_here(facts):
            yield fatal(
                "HF534", what, "none is up but loopback", "start the network; in a container use --network host"
            )
        else:
            yield passed("HF534", what, "loopback only: good for one node")
        return
    shown = named([f"{each.name} {each.addresses[0]}" for each in able])
    yield passed("HF534", what, shown)
    misleading = [each.name for each in able if is_bridge(each)]
    if not stays_here(facts) and misleading and not any(name in facts.variables for name in CHOOSERS):
        best = proposed(facts)
        why = f"{named(misleading)} beside {best}: NCCL or gloo may take the wrong one"
        yield warn("HF536", what, why, f"export NCCL_SOCKET_IFNAME={best} GLOO_SOCKET_IFNAME={best}")


def chosen_interfaces(facts: LocalFacts) -> Iterator[DoctorFinding]:
    """Those that the variables name."""
    for variable in CHOOSERS:
        text = facts.variables.get(variable)
        if not text:
            continue
        best = proposed(facts)
        fix = f"export {variable}={best}" if best else f"unset {variable}"
        taken = chosen(text, facts.interfaces, nccl=variable.startswith("NCCL"))
        able = [each for each in taken if each.up and each.addresses]
        if not taken:
            here = named([each.name for each in facts.interfaces]) or "none"
            yield fatal("HF535", variable, f"{text}: no such interface here; there are {here}", fix)
        elif not able:
            yield fatal("HF535", variable, f"{text}: {taken[0].name} is down or has no address", fix)
        elif not stays_here(facts) and all(is_local(each) or is_bridge(each) for each in able):
            yield warn("HF535", variable, f"{text}: {able[0].name} hardly leads to other nodes", fix)
        else:
            yield passed("HF535", variable, f"{text}: {named([each.name for each in able])}")


def ports(facts: LocalFacts) -> Iterator[DoctorFinding]:
    what = "ports"
    if facts.ephemeral_ports is None:
        return
    first, last = facts.ephemeral_ports
    if last - first + 1 < EPHEMERAL_PORTS_MIN:
        why = f"only {last - first + 1} for connections between ranks ({first} to {last})"
        yield warn("HF537", what, why, "sysctl net.ipv4.ip_local_port_range='32768 60999'")
    elif facts.endpoint_is_here is not False and first <= facts.endpoint_port <= last:
        why = f"the endpoint's {facts.endpoint_port} is one that the kernel gives to any program ({first} to {last})"
        yield warn("HF537", what, why, "take a port outside of it, as 29400 is")
    else:
        yield passed("HF537", what, f"{first} to {last} for connections between ranks")


def endpoint_port(facts: LocalFacts) -> Iterator[DoctorFinding]:
    if not facts.endpoint_port or facts.endpoint_is_here is None:
        return
    what = "endpoint"
    if not facts.endpoint_is_here:
        yield passed("HF538", what, f"{facts.endpoint} is another node's")
    elif facts.endpoint_holder:
        why = f"port {facts.endpoint_port} is held by {facts.endpoint_holder}"
        yield retry("HF538", what, why, "end it, or take another port on all nodes")
    else:
        yield passed("HF538", what, f"{facts.endpoint} is this node's, and free")


def stays_here(facts: LocalFacts) -> bool:
    """Nothing leaves this machine: one node, or several that meet on loopback."""
    host = facts.endpoint.rpartition(":")[0].strip("[]")
    return facts.nodes == 1 or is_loopback(host)


def proposed(facts: LocalFacts) -> str:
    """The interface to take: the default route's, else the fastest that is no bridge; empty when there is none."""
    able = candidates(facts)
    real = [each for each in able if not is_bridge(each)] or able
    for each in real:
        if each.name == facts.default_interface:
            return each.name
    return max(real, key=lambda each: each.speed_mbit_s).name if real else ""


def candidates(facts: LocalFacts) -> list[Interface]:
    """Those that may lead to another node."""
    return [each for each in facts.interfaces if each.up and each.addresses and not is_local(each)]


def chosen(text: str, interfaces: tuple[Interface, ...], *, nccl: bool) -> list[Interface]:
    """What such a variable picks. NCCL: prefixes, `=exact`, `^not`; gloo: exact names."""
    negated, exact = nccl and text.startswith("^"), not nccl
    text = text[1:] if negated else text
    if nccl and text.startswith("="):
        exact, text = True, text[1:]
    names = [name.strip() for name in text.split(",") if name.strip()]

    def fits(interface: Interface) -> bool:
        return any(interface.name == name if exact else interface.name.startswith(name) for name in names)

    return [each for each in interfaces if fits(each) != negated]


def is_bridge(interface: Interface) -> bool:
    return interface.name.startswith(BRIDGES)


def is_local(interface: Interface) -> bool:
    return interface.name == "lo" or (
        bool(interface.addresses) and all(is_loopback(address) for address in interface.addresses)
    )

"""Decides by binding which agent hosts the coordinator: the one that can bind the endpoint's address.

Knows sockets and names; knows nothing about the protocol. It guesses no host name and lists no interfaces: an address
belongs to this machine if it can be bound. Blocks as long as name resolution does. `who_holds` finds in /proc the
process that holds the port.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import NamedTuple

from holdfast.detached import run_detached
from holdfast.protocol.errors import EndpointError, PortInUseError
from holdfast.protocol.options import Endpoint, RunOptions
from holdfast.text import is_loopback, shortened

_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""
COMMAND_CHARS_MAX = 80
"""Length at which a command line is cut in a message."""
BACKLOG = 4096
"""Connections that wait to be accepted: all agents of a large job connect at the same moment."""
FREE_PORT_ATTEMPTS_MAX = 16
"""Number of attempts to find a port that is free on all addresses."""
_LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_WILDCARD = ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))
_NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL, errno.ENODEV})
"""Errors of bind for addresses of other machines (EINVAL: a link-local address without its interface)."""
Address = tuple[int, str]
"""Address family and numeric address."""


class Claim(NamedTuple):
    """The result of binding. The sockets listen already; the owner of a Claim closes them or passes them on."""

    sockets: tuple[socket.socket, ...]
    """Listening sockets; empty: another agent hosts the coordinator, to which this one connects."""
    addresses: tuple[str, ...]
    """Numeric addresses that were bound."""
    endpoint: Endpoint
    """The coordinator's endpoint for agents on this machine, with the real port."""
    reason: str
    """The reason of the decision, for the journal."""
    is_taken: bool = False
    """Whether the address is this machine's, but another process listens there: an agent of the job, or a stranger."""

    @property
    def is_host(self) -> bool:
        return bool(self.sockets)

    @property
    def port(self) -> int:
        return self.endpoint.port

    def close(self) -> None:
        for listening in self.sockets:
            listening.close()


def claim(endpoint: Endpoint, *, standalone: bool = False, is_host: bool | None = None) -> Claim:
    """Try to bind the endpoint.

    With `standalone` it listens on loopback, whatever the endpoint's host is. `is_host` True forces hosting, on all
    addresses when the endpoint's is not this machine's; False forbids it.

    Raises PortInUseError when hosting is required and the port is in use, EndpointError for port 0 (a free one) on
    another machine, OSError when the system refuses for another reason (a privileged port).
    """
    must_host = is_host is True or standalone or endpoint.port == 0
    if is_host is False and not standalone:
        if endpoint.port == 0:
            raise EndpointError(f"the endpoint {endpoint} has port 0 (any free port), but is_host forbids hosting")
        return _connect(endpoint, "is_host forbids hosting")

    addresses = _LOOPBACK if standalone else _addresses(endpoint.host)
    if not addresses and not must_host:
        return _connect(endpoint, f"{endpoint.host} does not resolve yet")
    listening = _listen_on(addresses, endpoint.port)
    if listening is None:
        if not must_host:
            return _connect(endpoint, f"{endpoint} is already bound on this machine", is_taken=True)
        raise _in_use(endpoint)
    if listening:
        return _hosted(listening)

    if is_host is not True:
        if endpoint.port == 0:
            raise EndpointError(f"the endpoint {endpoint} has port 0 (any free port), but is not on this machine")
        return _connect(endpoint, f"{endpoint.host} is not an address of this machine")
    # The endpoint's address is not bound here, but leads here, such as that of a load balancer.
    listening = _listen_on(_WILDCARD, endpoint.port)
    if not listening:
        raise _in_use(endpoint)
    return _hosted(listening)


def open_port(host: str | None, port: int, *, loopback: bool) -> Claim:
    """Listen for other agents, at any free port for port 0: on this host's addresses if they are this machine's, on
    loopback, or else on all addresses.

    Raises PortInUseError, or OSError when the system refuses for another reason.
    """
    for addresses in (_addresses(host) if host else (), _LOOPBACK if loopback else _WILDCARD):
        listening = _listen_on(addresses, port)
        if listening is None:
            raise _in_use(Endpoint(host=host or addresses[0][1], port=port))
        if listening:
            return _hosted(listening)
    raise _in_use(Endpoint(host="localhost", port=port))


def _connect(endpoint: Endpoint, reason: str, *, is_taken: bool = False) -> Claim:
    """The decision to connect to the coordinator instead of hosting it."""
    return Claim((), (), endpoint, reason, is_taken)


def _hosted(listening: list[socket.socket]) -> Claim:
    addresses = tuple(str(each.getsockname()[0]) for each in listening)
    port = listening[0].getsockname()[1]
    wildcard = {address for _, address in _WILDCARD}
    reachable = addresses[0]
    if reachable in wildcard:
        reachable = "127.0.0.1" if reachable == "0.0.0.0" else "::1"
    reason = f"bound {', '.join(addresses)} port {port}"
    return Claim(tuple(listening), addresses, Endpoint(host=reachable, port=port), reason)


def _in_use(endpoint: Endpoint) -> PortInUseError:
    holder = who_holds(endpoint.port) or "a process of another user or container"
    return PortInUseError(f"cannot host at {endpoint}: the port is held by {holder}")


def _addresses(host: str) -> tuple[Address, ...]:
    """Numeric addresses to try to bind, IPv4 first (the order must not differ between two agents of a node)."""
    if host == "localhost":
        return _LOOPBACK
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return ()
    addresses = tuple(sorted({(int(family), str(address[0])) for family, _, _, _, address in found}))
    if host not in (address for _, address in addresses) and all(is_loopback(address) for _, address in addresses):
        # This machine's own name, which Debian maps to loopback in /etc/hosts: peers use another address.
        return _WILDCARD
    return addresses


def _listen_on(addresses: tuple[Address, ...], port: int) -> list[socket.socket] | None:
    """Listening sockets on the addresses of this machine, all at one port; empty: no address is this machine's.

    None: the port is in use on the first of them. Later addresses are optional: a host that has IPv4 and IPv6 is
    reached by either. For port 0 the first socket chooses the port, which another program may have on a later address:
    then another port is tried.
    """
    attempts = FREE_PORT_ATTEMPTS_MAX if port == 0 else 1
    for attempt in range(1, attempts + 1):
        listening, in_use = _listen_once(addresses, port)
        if not in_use or attempt == attempts:
            break
        for each in listening:
            each.close()
    return None if in_use and not listening else listening


def _listen_once(addresses: tuple[Address, ...], port: int) -> tuple[list[socket.socket], bool]:
    """The sockets, and whether the port was in use on one of this machine's addresses."""
    listening: list[socket.socket] = []
    in_use = False
    try:
        for family, address in addresses:
            found = _listen(family, address, listening[0].getsockname()[1] if listening else port)
            if isinstance(found, socket.socket):
                listening.append(found)
            elif found == errno.EADDRINUSE:
                in_use = True
                if not listening:
                    break
    except OSError:
        for each in listening:
            each.close()
        raise
    return listening, in_use


def _listen(family: int, address: str, port: int) -> socket.socket | int:
    """A listening socket; or EADDRNOTAVAIL for an address of another machine, EADDRINUSE for a port in use."""
    try:
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        if error.errno in _NOT_HERE:
            return errno.EADDRNOTAVAIL
        raise
    try:
        # Connections of an earlier coordinator in TIME_WAIT would block the port for a minute.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Two sockets may bind the same address while none listens, so that listen can fail as bind can.
        listening.bind((address, port))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        if error.errno in _NOT_HERE:
            return errno.EADDRNOTAVAIL
        if error.errno == errno.EADDRINUSE:
            return errno.EADDRINUSE
        raise
    return listening


def who_holds(port: int) -> str | None:
    """The process that listens on this TCP port of this machine, as `pid 4711 (alice): python train.py`.

    None: there is none, or it belongs to another user and is not readable. Never raises.
    """
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    targets = {f"socket:[{inode}]" for inode in inodes}
    for pid in filter(str.isdigit, _list("/proc")):
        if any(_target(f"/proc/{pid}/fd/{fd}") in targets for fd in _list(f"/proc/{pid}/fd")):
            return _describe(pid)
    return None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _read(table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes - {"0"}


def _describe(pid: str) -> str:
    command = " ".join(_read(f"/proc/{pid}/cmdline").split("\0")).strip() or _read(f"/proc/{pid}/comm").strip()
    shown = "".join(character if character.isprintable() else " " for character in command)
    return f"pid {pid} ({_user(pid)}): {shortened(shown, COMMAND_CHARS_MAX)}"


def _user(pid: str) -> str:
    import pwd  # only for an error message

    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "user unknown"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:  # it has ended, or is not readable for this user
        return []


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


async def claim_endpoint(options: RunOptions, endpoint: Endpoint | None = None) -> Claim:
    """Bind the job's endpoint, or another one of its list, if it is this machine's."""
    wanted = options.is_host if endpoint is None else None
    place = options.endpoint if endpoint is None else endpoint
    if wanted is None and options.job.fixed_ranks and options.node_rank:
        wanted = False  # static: the endpoint is node 0's, also where two nodes share a machine
    if _is_numeric_or_local(place.host):
        return claim(place, standalone=options.standalone, is_host=wanted)
    return await run_detached(lambda: claim(place, standalone=options.standalone, is_host=wanted))


def _is_numeric_or_local(host: str) -> bool:
    """Whether the host needs no resolver, hence no thread."""
    return host == "localhost" or ":" in host or host.replace(".", "").isdecimal()

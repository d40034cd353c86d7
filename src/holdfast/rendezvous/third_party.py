"""Rendezvous backends with a shared value, as packages offer them: their interface, and the election by the value.

A backend offers one small value that all nodes of a job can read and replace:

    class Backend(holdfast.rendezvous.third_party.Backend):
        conf_keys = ("token",)

        def open(self, place):
            return MyValue(place.endpoint, place.run_id, place.conf.get("token"))

    [project.entry-points."holdfast.rendezvous"]
    mine = "my_package:Backend"

`holdfast run --rdzv-backend=mine --rdzv-endpoint=… train.py` then elects the node that hosts the coordinator. It is the
first node that replaces an empty value, or a value that has not changed for one lease. The backend needs no lease,
clock or time-out of its own. docs/internals/rendezvous-backends.md explains how to write one.

The leader changes the value periodically (`beat`). Each other agent measures by its own clock for how long it has seen
the present value. The leader steps down before one lease has passed, by its own clock (runtime/leadership.py). No
clock of another machine and no time-out of the storage is trusted.
"""

from __future__ import annotations

import importlib.metadata
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.protocol.errors import BackendError, BackendUnreachableError, HoldfastError, RendezvousConfigError
from holdfast.protocol.options import SharedValueOptions
from holdfast.rendezvous.backends import BACKENDS, BY_VALUE, GROUP, installed_backends, is_built_in
from holdfast.rendezvous.conf import Conf, parse_endpoint, read_conf
from holdfast.rendezvous.elections import Api, Leader, Memory, address_of_default_route, read_record

LEASE_TTL_S = 5
"""Default of `lease_ttl`."""
Answer = TypeVar("Answer")


class Place(NamedTuple):
    """The value that a backend is asked to open: where it is, and whose it is."""

    endpoint: str
    """The text of --rdzv-endpoint, trimmed: an address, a path, a URL … The backend defines its form; may be empty."""
    run_id: str
    """The text of --rdzv-id, any text. Jobs with different ids must not see each other's value."""
    conf: Mapping[str, str]
    """The values of --rdzv-conf for the backend's `conf_keys`."""

    def host_and_port(self, default_port: int | None) -> tuple[str, int]:
        """The endpoint read as `host[:port]`, as the built-in backends do. Raises EndpointError."""
        endpoint = parse_endpoint(self.endpoint, default_port)
        return endpoint.host, endpoint.port


class SharedValue(ABC):
    """A value of at most 4 KiB, the same for all nodes. Used by one thread at a time, not always by the same one.

    Every method may block and should give up after about a second. It raises OSError (ConnectionError, TimeoutError …)
    when another attempt may succeed; any other exception ends this node's part of the job.
    """

    @abstractmethod
    def read(self) -> bytes | None:
        """The newest value; None or empty: there is none. A value that is a little old costs time, but is safe."""

    @abstractmethod
    def swap(self, old: bytes | None, new: bytes) -> bool:
        """Atomically replace `old` by `new` if the value is still `old`.

        `old` None means that there is no value, or an empty one. An empty `new` means that the job is over, and the
        value may be deleted. Returns False if the value was not `old`, and nothing was changed. holdfast never writes
        two equal values.
        """

    def local_address(self) -> str | None:
        """The address at which the other nodes reach this one, if the backend knows it, for example from its connection
        to a server; None: the address of the default route is used. --local-addr has priority over both."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Release what the value uses. It is not used any more."""


class Backend(ABC):
    """Base class of backends. The entry point names a derived class, which is called without arguments."""

    conf_keys: ClassVar[Collection[str]] = ()
    """The --rdzv-conf keys of this backend, in addition to holdfast's own (join_timeout, lease_ttl …)."""

    @abstractmethod
    def open(self, place: Place) -> SharedValue:
        """Make the value without connecting to anything. Also called, and closed again, to check the command line.

        Raises ValueError, with a message for the user, when the endpoint or a key is invalid.
        """


def load_backend(name: str) -> Backend:
    """The backend of this name, which is built in or offered by an installed package.

    Raises RendezvousConfigError, naming the package, if there is none, if two packages use the name, or if the entry
    point cannot be loaded or is not a Backend.
    """
    entry = _entry_point(name)
    who = f"--rdzv-backend {name!r} ({_offer(entry)})"
    try:
        offered = entry.load()
        made = offered() if callable(offered) else offered
    except HoldfastError:
        raise
    except Exception as error:  # foreign code may raise anything; the message names the package
        raise RendezvousConfigError(f"{who} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(made, Backend):
        kind = type(made).__name__
        raise RendezvousConfigError(f"{who} is a {kind}, not a holdfast.rendezvous.third_party.Backend")
    keys = made.conf_keys
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise RendezvousConfigError(f"{who}: conf_keys must be a collection of names, not {keys!r}")
    return made


def _entry_point(name: str) -> importlib.metadata.EntryPoint:
    if is_built_in(name):
        return importlib.metadata.EntryPoint(name, BACKENDS[name].shared_value, GROUP)
    offers = {entry.value: entry for entry in installed_backends() if entry.name == name}
    if not offers:
        raise RendezvousConfigError(f"--rdzv-backend {name!r}: no installed package offers it")
    if len(offers) > 1:
        both = " and ".join(sorted(_offer(entry) for entry in offers.values()))
        raise RendezvousConfigError(f"--rdzv-backend {name!r} is offered by {both}; uninstall one of them")
    return next(iter(offers.values()))


def _offer(entry: importlib.metadata.EntryPoint) -> str:
    package = f" of {entry.dist.name}" if entry.dist is not None else ""
    return f"{entry.value}{package}"


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value: the leader, and the constraints for the next one."""

    holdfast: int = 1
    run_id: str
    address: str
    port: int
    identity: str
    """A text that is used once, so that two leases differ."""
    beat: int = 0
    """A counter that grows with every change, so that no two values are equal."""
    held: bool = True
    """Whether the agent still leads; False: it has released the lease."""
    generation: int = 0
    """The newest generation that may have been started, as in Memory."""
    workers_may_live_s: float = 0.0
    """Time after the end of the lease in which the leader's workers may still be alive, as in Memory."""


class ValueWatch:
    """The time for which this agent has seen the present value. All its clients share it, in any thread."""

    def __init__(self, lease_ttl_s: float, clock: Callable[[], float] | None = None) -> None:
        self._lease_ttl_s = lease_ttl_s
        self._clock = clock or _clock_s
        self._value = b""
        self._since_s = 0.0
        self._lock = threading.Lock()

    def expired(self, value: bytes) -> bool:
        """Whether this value, which was just read, has been there for a whole lease."""
        with self._lock:
            now_s = self._clock()
            if value != self._value:
                self._value, self._since_s = value, now_s
            return now_s - self._since_s >= self._lease_ttl_s


class ValueApi:
    """A client of the value; implements Api of elections.py. Raises BackendError or BackendUnreachableError."""

    notice = ""

    def __init__(self, name: str, value: SharedValue, run_id: str, watch: ValueWatch) -> None:
        """`name` is the backend's, for messages."""
        self._name = name
        self._value = value
        self._run_id = run_id
        self._watch = watch

    def leader(self) -> Leader | None:
        found = self._read_record()
        if found is None or not self._is_held(*found):
            return None
        record = found[1]
        return Leader(run_id=record.run_id, address=record.address, port=record.port, identity=record.identity)

    def take(self, me: Leader) -> ValueLeaderLease | None:
        found = self._read_record()
        if found is not None and self._is_held(*found):
            return None
        before = found[1] if found is not None else None
        mine = Record(
            run_id=me.run_id,
            address=me.address,
            port=me.port,
            identity=me.identity,
            generation=before.generation if before is not None else 0,
            workers_may_live_s=before.workers_may_live_s if before is not None else 0.0,
        )
        if not self.swap(found[0] if found is not None else None, encode(mine)):
            return None
        memory = None
        if before is not None:
            memory = Memory(
                run_id=before.run_id, generation=before.generation, workers_may_live_s=before.workers_may_live_s
            )
        return ValueLeaderLease(self, mine, memory)

    def close(self) -> None:
        self._ask(self._value.close)

    # ---------------------------------------------------------------- what the leader lease uses

    def read(self) -> bytes | None:
        """The value; None also for an empty one."""
        value = self._ask(self._value.read)
        if value is not None and not isinstance(value, bytes):
            raise BackendError(f"{self._who}: read() must return bytes or None, not {value!r:.60}")
        return value or None

    def swap(self, old: bytes | None, new: bytes) -> bool:
        answer = self._ask(lambda: self._value.swap(old, new))
        if not isinstance(answer, bool):
            raise BackendError(f"{self._who}: swap() must return True or False, not {answer!r:.60}")
        return answer

    def decode(self, value: bytes) -> Record:
        return read_record(Record, self._who, value, self._run_id, BackendError)

    @property
    def _who(self) -> str:
        return f"rendezvous backend {self._name}"

    def _read_record(self) -> tuple[bytes, Record] | None:
        value = self.read()
        return None if value is None else (value, self.decode(value))

    def _is_held(self, value: bytes, record: Record) -> bool:
        expired = self._watch.expired(value)
        return record.held and not expired

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        return ask(self._name, question)


def ask(name: str, question: Callable[[], Answer], *, unchanged: tuple[type[Exception], ...] = ()) -> Answer:
    """Call a third party's code.

    Raises BackendUnreachableError for OSError, exceptions of the `unchanged` classes as they are, BackendError for all
    others.
    """
    try:
        return question()
    except HoldfastError:
        raise
    except unchanged:
        raise
    except OSError as error:
        text = error.strerror or str(error) or type(error).__name__
        raise BackendUnreachableError(f"rendezvous backend {name}: {text}") from error
    except Exception as error:  # foreign code may raise anything; the message names the backend
        raise BackendError(f"rendezvous backend {name} failed: {type(error).__name__}: {error}") from error


class ValueLeaderLease:
    """The lease of this agent; implements LeaderLease. It lasts as long as the value has this agent's identity."""

    def __init__(self, api: ValueApi, record: Record, previous_leader: Memory | None) -> None:
        self._api = api
        self._record = record
        self.previous_leader = previous_leader

    def renew(self) -> bool:
        return self._write(self._record)

    def remember(self, memory: Memory) -> bool:
        return self._write(
            replace(self._record, generation=memory.generation, workers_may_live_s=memory.workers_may_live_s)
        )

    def resign(self, memory: Memory | None) -> None:
        if memory is None:
            self._swap(b"")
        else:
            self._write(
                replace(
                    self._record, held=False, generation=memory.generation, workers_may_live_s=memory.workers_may_live_s
                )
            )

    def _write(self, record: Record) -> bool:
        fresh = replace(record, beat=self._record.beat + 1)
        if not self._swap(encode(fresh)):
            return False
        self._record = fresh
        return True

    def _swap(self, new: bytes) -> bool:
        if self._api.swap(encode(self._record), new):
            return True

        # An earlier swap may have succeeded without its answer: only this agent writes its identity.
        value = self._api.read()
        if value is None:
            return new == b""
        if value == new:
            return True
        return self._api.decode(value).identity == self._record.identity and self._api.swap(value, new)


def encode(record: Record) -> bytes:
    return msgspec.json.encode(record)


def _clock_s() -> float:
    """A clock that continues while the process is stopped or the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ValueElection:
    """The election by a shared value; implements Election."""

    def __init__(self, name: str, backend: Backend, options: SharedValueOptions, run_id: str) -> None:
        self._name = name
        self._backend = backend
        self._place = Place(options.endpoint, run_id, options.conf)
        self._watch = ValueWatch(options.lease_ttl_s)
        self.lease_ttl_s: float = options.lease_ttl_s
        self.by_loopback = "no route leads out of this machine"

    def open_api(self) -> Api:
        return ValueApi(self._name, open_value(self._name, self._backend, self._place), self._place.run_id, self._watch)

    def own_address(self) -> str:
        value = open_value(self._name, self._backend, self._place)
        try:
            return ask(self._name, value.local_address) or address_of_default_route()
        finally:
            value.close()


def open_value(name: str, backend: Backend, place: Place) -> SharedValue:
    """The backend's value. Raises RendezvousConfigError, or BackendError when the backend breaks its contract."""
    try:
        value = ask(name, lambda: backend.open(place), unchanged=(ValueError,))
    except ValueError as error:
        raise RendezvousConfigError(f"--rdzv-backend {name}: {error}") from None
    if not isinstance(value, SharedValue):
        raise BackendError(f"rendezvous backend {name}: open() must return a SharedValue, not {value!r:.60}")
    return value


def read_shared_value(name: str, backend: Backend, endpoint: str, run_id: str, conf: Conf) -> SharedValueOptions:
    """The options of an election by this backend, after the backend has checked them.

    Raises RendezvousConfigError, EndpointError or BackendError.
    """
    taken = sorted(BY_VALUE.keys.keys() & set(backend.conf_keys))
    if taken:
        raise RendezvousConfigError(
            f"--rdzv-backend {name}: its conf_keys {', '.join(taken)} are reserved for holdfast"
        )
    own = {key: value for key, value in conf.items() if key in backend.conf_keys}
    lease_ttl_s = read_conf(name, conf).get("lease_ttl", LEASE_TTL_S)
    assert isinstance(lease_ttl_s, int)
    open_value(name, backend, Place(endpoint, run_id, own)).close()
    return SharedValueOptions(endpoint=endpoint, conf=own, lease_ttl_s=lease_ttl_s)

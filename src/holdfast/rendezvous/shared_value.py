"""The election of third-party backends: a lease in a value that can only be read and compared-and-swapped.

The leader changes the value periodically (`beat`). A value that has not changed for one lease is free. Each observing
agent measures that by its own clock, from when it first saw the value. The holder steps down before that, by its own
clock (runtime/leadership.py). No clock of another machine and no time-out of the storage is trusted.

It implements the interfaces of elections.py, as etcd.py does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.protocol.errors import BackendError, BackendUnreachableError, HoldfastError
from holdfast.rendezvous.elections import Leader, Memory, read_record
from holdfast.rendezvous.third_party import SharedValue

Answer = TypeVar("Answer")


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value: the leader, and the constraints for the next one."""

    holdfast: int = 1
    run_id: str
    address: str
    port: int
    identity: str
    """Used once, so that two leases differ."""
    beat: int = 0
    """Grows with every change, so that no two values are alike."""
    held: bool = True
    """False: the holder has released it."""
    generation: int = 0
    tail_s: float = 0.0


class ValueWatch:
    """Measures for how long this agent has seen the present value. Shared by all its clients, in any thread."""

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
    """One client; implements Api of elections.py. Raises BackendError or BackendUnreachableError."""

    notice = ""

    def __init__(self, name: str, value: SharedValue, run_id: str, watch: ValueWatch) -> None:
        """`name` of the backend, for messages."""
        self._name = name
        self._value = value
        self._run_id = run_id
        self._watch = watch

    def leader(self) -> Leader | None:
        found = self._look()
        if found is None or not self._is_held(*found):
            return None
        record = found[1]
        return Leader(run_id=record.run_id, address=record.address, port=record.port, identity=record.identity)

    def take(self, me: Leader) -> ValueLeaderLease | None:
        found = self._look()
        if found is not None and self._is_held(*found):
            return None
        before = found[1] if found is not None else None
        mine = Record(
            run_id=me.run_id,
            address=me.address,
            port=me.port,
            identity=me.identity,
            generation=before.generation if before is not None else 0,
            tail_s=before.tail_s if before is not None else 0.0,
        )
        if not self.swap(found[0] if found is not None else None, encode(mine)):
            return None
        memory = None
        if before is not None:
            memory = Memory(run_id=before.run_id, generation=before.generation, tail_s=before.tail_s)
        return ValueLeaderLease(self, mine, memory)

    def close(self) -> None:
        self._ask(self._value.close)

    # For the leader lease

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

    def _look(self) -> tuple[bytes, Record] | None:
        value = self.read()
        return None if value is None else (value, self.decode(value))

    def _is_held(self, value: bytes, record: Record) -> bool:
        expired = self._watch.expired(value)
        return record.held and not expired

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        return ask(self._name, question)


def ask(name: str, question: Callable[[], Answer], *, passing: tuple[type[Exception], ...] = ()) -> Answer:
    """Calls a third party's code.

    Raises BackendUnreachableError for OSError, exceptions of a `passing` class unchanged, BackendError for all others.
    """
    try:
        return question()
    except HoldfastError:
        raise
    except passing:
        raise
    except OSError as error:
        text = error.strerror or str(error) or type(error).__name__
        raise BackendUnreachableError(f"rendezvous backend {name}: {text}") from error
    except Exception as error:  # foreign code may raise anything; the message names the backend
        raise BackendError(f"rendezvous backend {name} failed: {type(error).__name__}: {error}") from error


class ValueLeaderLease:
    """The lease of this agent, which holds the value as long as it has this agent's identity."""

    def __init__(self, api: ValueApi, record: Record, previous_leader: Memory | None) -> None:
        self._api = api
        self._record = record
        self.previous_leader = previous_leader

    def renew(self) -> bool:
        return self._write(self._record)

    def remember(self, memory: Memory) -> bool:
        return self._write(replace(self._record, generation=memory.generation, tail_s=memory.tail_s))

    def resign(self, memory: Memory | None) -> None:
        if memory is None:
            self._swap(b"")
        else:
            self._write(replace(self._record, held=False, generation=memory.generation, tail_s=memory.tail_s))

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

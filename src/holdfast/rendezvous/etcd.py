"""What holdfast keeps in etcd, and what it asks of an etcd API; the two APIs are etcd_v2.py and etcd_v3.py.

Two keys a job: `<prefix>/<run id>/coordinator` under a lease says who is in charge and where; `<prefix>/<run id>/memory`
outlives the leader and says what a successor must heed. Knows the records and their bounds; opens no socket itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
from msgspec import Struct

from holdfast.core.errors import EtcdError, EtcdUnreachableError

if TYPE_CHECKING:
    from holdfast.core.options import Endpoint, EtcdOptions

RECORD_BYTES_MAX = 4096
MEMORY_TTL_S = 120
"""The memory of a job that nobody leads any more is kept this long; its workers are long gone by then."""
CALL_S_MAX = 1.0
"""One call to one server: without quorum etcd answers nothing at all."""
SHOWN_CHARS_MAX = 60


class Leader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who hosts the coordinator: the value of the key under the lease."""

    holdfast: int = 1
    run_id: str
    address: str
    port: int
    identity: str
    """Used once: tells two terms of office of one agent apart."""


class Memory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a successor must heed."""

    holdfast: int = 1
    run_id: str
    generation: int
    """The newest that may have been started; 0: none."""
    tail_s: float
    """So long after the leader's key is gone its workers may still live somewhere."""


class Tenure(Protocol):
    """We hold the leader's key. Every method blocks; raises EtcdUnreachableError when no server answers."""

    predecessor: Memory | None
    """What was remembered when we came to office."""

    def renew(self) -> bool:
        """False: the key is not ours any more."""

    def remember(self, memory: Memory) -> bool:
        """False: the key is not ours any more, and nothing was written."""

    def resign(self, memory: Memory | None) -> None:
        """Give the key back, if it is still ours; None: the job is over, forget it altogether."""


class Api(Protocol):
    """One client of etcd, for one thread at a time. Raises EtcdError, or EtcdUnreachableError when trying again may help."""

    notice: str
    """Worth a line to the people at this node; empty: nothing is."""

    def leader(self) -> Leader | None: ...

    def take(self, me: Leader) -> Tenure | None:
        """Take the leader's key if nobody has it. None: somebody has."""

    def close(self) -> None: ...


def open_api(options: EtcdOptions, run_id: str) -> Api:
    """The client that the backend asks for; opens no connection yet. Raises MissingPackageError."""
    if options.api == "v2":
        from holdfast.rendezvous.etcd_v2 import ApiV2

        return ApiV2(options, run_id)
    from holdfast.rendezvous.etcd_v3 import open_v3

    return open_v3(options, run_id)


def leader_key(options: EtcdOptions, run_id: str) -> str:
    return f"{_folder(options, run_id)}/coordinator"


def memory_key(options: EtcdOptions, run_id: str) -> str:
    return f"{_folder(options, run_id)}/memory"


def _folder(options: EtcdOptions, run_id: str) -> str:
    from urllib.parse import quote

    return f"{options.prefix}/{quote(run_id, safe='')}"


Record = TypeVar("Record", Leader, Memory)


def read_record(kind: type[Record], key: str, value: bytes, run_id: str) -> Record:
    """Raises EtcdError when the value is not what this job writes there."""
    try:
        if len(value) > RECORD_BYTES_MAX:
            raise EtcdError(f"the etcd key {key} holds {len(value)} bytes that are not holdfast's; {_REMEDY}")
        record = msgspec.json.decode(value, type=kind)
    except msgspec.DecodeError:  # ValidationError too
        shown = value[:SHOWN_CHARS_MAX].decode("utf-8", "replace")
        raise EtcdError(f"the etcd key {key} holds what holdfast did not write: {shown!r}; {_REMEDY}") from None
    if record.run_id != run_id:
        raise EtcdError(f"the etcd key {key} belongs to the job {record.run_id!r}, not {run_id!r}; {_REMEDY}")
    return record


_REMEDY = "delete it, or choose another --rdzv-id or --rdzv-conf etcd_prefix="


def write_record(record: Leader | Memory) -> bytes:
    return msgspec.json.encode(record)


Client = TypeVar("Client")
Answer = TypeVar("Answer")


class Servers:
    """The addresses of one etcd, in the order in which they are tried: the one that answered last comes first."""

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._endpoints = list(endpoints)

    def ask(self, question: Callable[[Endpoint], Answer]) -> Answer:
        """The first answer. Raises EtcdUnreachableError, naming why for each, when no server has one."""
        why: list[str] = []
        for _ in range(len(self._endpoints)):
            endpoint = self._endpoints[0]
            try:
                return question(endpoint)
            except EtcdUnreachableError as error:
                why.append(f"{endpoint}: {error}")
                self._endpoints.append(self._endpoints.pop(0))
        raise EtcdUnreachableError(f"no etcd answers at {'; '.join(why)}")

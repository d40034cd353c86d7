"""What a rendezvous backend from outside has to offer: one small value that all nodes of a job can read and replace.

    class Backend(holdfast.rendezvous.third_party.Backend):
        conf_keys = ("token",)

        def open(self, place):
            return MyValue(place.endpoint, place.run_id, place.conf.get("token"))

    [project.entry-points."holdfast.rendezvous"]
    mine = "my_package:Backend"

`holdfast run --rdzv-backend=mine --rdzv-endpoint=… train.py` then elects the node that hosts the coordinator by that
value: the node that first replaces an empty one, or one that has not changed for a lease, is in charge and goes on
changing it (see shared_value.py). The backend needs no lease, clock or time-out of its own. How to write one:
docs/rendezvous.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import ClassVar, NamedTuple

from holdfast.rendezvous.conf import parse_endpoint


class Place(NamedTuple):
    """Where and for whom to open the value."""

    endpoint: str
    """--rdzv-endpoint as given, trimmed: an address, a path, a URL … Its form is the backend's own; may be empty."""
    run_id: str
    """--rdzv-id: any text; jobs with different ids must not see each other's value."""
    conf: Mapping[str, str]
    """Those of the backend's `conf_keys` that --rdzv-conf gives."""

    def host_and_port(self, default_port: int | None) -> tuple[str, int]:
        """The endpoint read as `host[:port]`, as the built-in backends do. Raises EndpointError."""
        endpoint = parse_endpoint(self.endpoint, default_port)
        return endpoint.host, endpoint.port


class SharedValue(ABC):
    """At most 4 KiB that all nodes see alike. Used by one thread at a time, not always the same one.

    Every method blocks and should give up after about a second. It raises OSError (ConnectionError, TimeoutError …)
    when trying again may help; any other exception ends this node's part in the job.
    """

    @abstractmethod
    def read(self) -> bytes | None:
        """The newest value; None or empty when there is none. One that is a little old costs time, never safety."""

    @abstractmethod
    def swap(self, old: bytes | None, new: bytes) -> bool:
        """Replace `old` by `new` if the value is still `old`, as one step that no other node can come between.

        `old` None: if there is no value, or an empty one. `new` empty: the job is over, the value may be deleted.
        False: it was not `old`, and nothing was changed. No two values that holdfast writes are ever equal.
        """

    def local_address(self) -> str | None:
        """The address under which the other nodes reach this one, if the backend can tell: that from which it reached
        its server, say. None: that of the default route. --local-addr comes before both."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Nobody will use it any more."""


class Backend(ABC):
    """The entry point names a class derived from this one; it is made without arguments."""

    conf_keys: ClassVar[Collection[str]] = ()
    """--rdzv-conf keys that `open` understands, beside holdfast's own (join_timeout, lease_ttl …)."""

    @abstractmethod
    def open(self, place: Place) -> SharedValue:
        """Cheap: nothing is connected to yet. Also called, and closed again, to judge the command line.

        Raises ValueError, with words for the person who typed it, when the endpoint or a key cannot be meant.
        """

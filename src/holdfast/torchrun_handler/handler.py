"""torch's rendezvous interface over a HandlerMembership: a new store for each generation, and torch's own errors.

Knows torch; knows nothing of asyncio, protocols or the coordinator.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from holdfast.protocol.errors import JoinTimeoutError
from holdfast.protocol.outcome import OutcomeKind
from holdfast.torchrun_handler.member import BACKEND, FormedGeneration, HandlerMembership, OverError, options_from
from holdfast.train.store_server import open_store

CONNECT_S = 3.0
"""Limit of one attempt to connect to a generation's store. Between attempts the handler checks whether the generation
is still current."""
CONNECT_S_MAX = 60.0
"""Limit of all attempts together."""
STORE_S_MAX = 300.0
"""Limit of one operation on the store: torch's default."""

log = logging.getLogger(__name__)


class HoldfastRendezvous(RendezvousHandler):  # type: ignore[misc]  # torch's types are skipped
    """The rendezvous handler of one torchrun agent."""

    def __init__(self, params: RendezvousParameters) -> None:
        options = options_from(params)
        for notice in options.notices:
            log.warning("holdfast: %s", notice)
        self._run_id = options.job.run_id
        self._membership = HandlerMembership(options, lambda text: log.warning("holdfast: %s", text))

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers use each generation's store too, as with c10d. torch's own switch turns it off."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node has its place in a generation whose store answers."""
        while True:
            try:
                formed = self._membership.next()
            except OverError as error:
                raise _as_torchs(error) from None
            # Counted from here: the wait for other nodes may have been longer than this.
            store = self._open(formed, time.monotonic() + CONNECT_S_MAX)
            if store is not None:  # None: the generation was given up meanwhile
                return self._info(formed, store)

    def num_nodes_waiting(self) -> int:
        """1 when this generation must be stopped for any reason: torchrun knows no other signal for that."""
        return 1 if self._membership.regroup else 0

    def is_closed(self) -> bool:
        return self._membership.over

    def set_closed(self) -> None:
        self._membership.end("the rendezvous was closed")

    def shutdown(self) -> bool:
        """End the membership. torchrun calls this after success and after failure; only the exception that is being
        handled distinguishes them."""
        # torch 2.6: its agent calls this at its end, too, before torchrun does. Then it is not known yet whether its
        # workers have failed; and after a signal this node leaves, and the job goes on.
        if sys._getframe(1).f_code.co_name == "_shutdown":
            return False
        error = sys.exception()
        return self._membership.end("" if error is None else f"{type(error).__name__}")

    def _open(self, formed: FormedGeneration, deadline_s: float) -> Store | None:
        """Open the generation's store; None: the generation was given up meanwhile. Raises
        RendezvousConnectionError."""
        if formed.listening is not None:  # this node hosts the store, at the port that was announced
            return open_store(TCPStore, formed.listening.detach())
        while True:
            try:
                store = TCPStore(
                    formed.master_addr,
                    formed.master_port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=CONNECT_S),
                )
            except DistError as error:
                if self._membership.regroup:
                    return None
                if time.monotonic() >= deadline_s:
                    address = f"{formed.master_addr}:{formed.master_port}"
                    raise RendezvousConnectionError(
                        f"holdfast: no store at {address} (rank 0's node): {error}"
                    ) from None
                continue
            store.set_timeout(timedelta(seconds=STORE_S_MAX))
            return store

    def _info(self, formed: FormedGeneration, store: Store) -> RendezvousInfo:
        agents_store = PrefixStore(f"holdfast/agents/{formed.generation}", store)
        if self.use_agent_store:
            workers_store = RendezvousStoreInfo(formed.master_addr, formed.master_port)
        else:  # the first worker serves a store of its own; the agents agree on its port
            workers_store = RendezvousStoreInfo.build(formed.group_rank, agents_store, formed.master_addr)
        return RendezvousInfo(agents_store, formed.group_rank, formed.group_world_size, workers_store)


def _as_torchs(error: OverError) -> RendezvousError:
    """The error of torch that torchrun handles as the end it is: a time-out, a connection, a closed rendezvous."""
    outcome = error.outcome
    match outcome.kind:
        case OutcomeKind.NO_QUORUM if outcome.code == JoinTimeoutError.code:
            return RendezvousTimeoutError(f"holdfast: {outcome.code}: {outcome.message}")
        case OutcomeKind.NO_QUORUM | OutcomeKind.REFUSED:
            return RendezvousConnectionError(f"holdfast: {outcome.code}: {outcome.message}")
        case OutcomeKind.SUCCEEDED:
            return RendezvousClosedError("holdfast: the job is over, it has succeeded")
    last = f" (last: {error.last_stop})" if error.last_stop else ""
    return RendezvousClosedError(f"holdfast: the job is over: a torchrun of it has ended with a failure{last}")

"""Connects this process to the coordinator under a leader lease: dials the agent that holds the lease, or takes the
lease.

Binds first and publishes after. Knows the order of the attempts; the agent machine decides when to try again and when
to give up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from holdfast.coordinator.ending import Judge
from holdfast.coordinator.leased import LeasedCoordinator
from holdfast.coordinator.monitor import cannot_tell
from holdfast.protocol.errors import CoordinatorUnreachableError, EtcdError, EtcdUnreachableError, PortInUseError
from holdfast.protocol.options import Endpoint, RunOptions
from holdfast.protocol.policy import NodeSpec
from holdfast.protocol.rank_progress import Examine
from holdfast.rendezvous.bind import Claim, claim
from holdfast.rendezvous.elections import Api, Election, Leader, LeaderLease
from holdfast.runtime.driver import run_detached
from holdfast.runtime.etcd_service import ElectedService, LeaseHolder, clock_s
from holdfast.runtime.journal import Journal

if TYPE_CHECKING:
    from holdfast.runtime.rendezvous_client import CoordinatorLink

WATCH_INTERVAL_S = (0.15, 0.35)
"""Between two reads of the key while its holder does not answer: random, so that agents do not read all at once."""
WATCH_S_MAX = 2.0
"""After a failed dial: the key is watched this long before the attempt counts as failed."""
SEEK_S_MAX = 15.0
"""One search for the leader, with all its calls: another store's calls may hang for ever."""
TURNS_MAX = 8
"""Leaders found and lost in one attempt."""


class Won(NamedTuple):
    """The key is ours, and the socket that it names listens."""

    place: Claim
    leader: Leader
    lease_holder: LeaseHolder


class ElectedClient:
    """The client of one agent. Holds the coordinator while this process is the leader."""

    def __init__(
        self,
        options: RunOptions,
        election: Election,
        judge: Judge,
        journal: Journal,
        say: Callable[[str], None],
        examine: Examine = cannot_tell,
    ) -> None:
        self._examine = examine
        self._options = options
        self._election = election
        self._judge = judge
        self._journal = journal
        self._say = say
        self._service: ElectedService | None = None
        self._lease_holder: LeaseHolder | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._notice = ""
        self._met = False
        """This node has had a link to some coordinator: the command line and the storage are valid."""

    async def reach(self, node: NodeSpec) -> CoordinatorLink:
        """Make one attempt. Raises HoldfastError; once the job was reached, a refusal by the storage is no reason to
        end."""
        try:
            link = await self._reach(node)
        except EtcdError as error:
            if self._met and not isinstance(error, EtcdUnreachableError):
                raise EtcdUnreachableError(str(error)) from None
            raise
        self._met = True
        return link

    async def _reach(self, node: NodeSpec) -> CoordinatorLink:
        if self._leaving is not None:
            await asyncio.shield(self._leaving)
        for _ in range(TURNS_MAX):
            if self._service is not None:
                return self._service.connect_locally()
            try:
                async with asyncio.timeout(SEEK_S_MAX):
                    found = await run_detached(self._seek)
            except TimeoutError:
                raise EtcdUnreachableError(f"who is in charge could not be learnt within {SEEK_S_MAX:g} s") from None
            if isinstance(found, Won):
                await self._host(found)
                continue
            link = await self._dial_while_in_charge(found, node)
            if link is not None:
                return link
        raise CoordinatorUnreachableError(f"the coordinator changed {TURNS_MAX} times while it was dialled")

    async def close(self) -> None:
        if self._service is not None and self._lease_holder is not None:
            service, lease_holder = self._service, self._lease_holder
            self._service = None
            await service.close()
            forget = service.machine.outcome is not None
            words = service.last_words()
            await run_detached(lambda: lease_holder.leave(words, forget=forget or words is None))
        if self._leaving is not None:
            await self._leaving

    # ---------------------------------------------------------------- seeking: blocks, in its own thread

    def _seek(self) -> Leader | Won:
        """The present leader; if there is none, try to become it."""
        api = self._election.open_api()
        if api.notice != self._notice:
            self._notice = api.notice
            self._say(api.notice)
        kept = False
        try:
            leader = api.leader()
            if leader is None:
                taken = self._campaign(api)
                if taken is not None:
                    kept = True
                    return taken
                leader = api.leader()
        finally:
            if not kept:
                api.close()
        if leader is None:
            raise EtcdUnreachableError("the coordinator's key changes hands")
        return leader

    def _campaign(self, api: Api) -> Won | None:
        options = self._options
        address = options.local_addr or self._election.own_address()
        place = claim(Endpoint(host=address, port=0), is_host=True)
        leader_lease: LeaderLease | None = None
        try:
            me = Leader(run_id=options.job.run_id, address=address, port=place.port, identity=os.urandom(8).hex())
            began_s = clock_s()
            leader_lease = api.take(me)
        finally:
            if leader_lease is None:
                place.close()
        if leader_lease is None:
            return None
        return Won(place, me, LeaseHolder(api, leader_lease, self._election.lease_ttl_s, began_s))

    # ---------------------------------------------------------------- following

    async def _dial_while_in_charge(self, leader: Leader, node: NodeSpec) -> CoordinatorLink | None:
        """The link; None when the leader has changed meanwhile, or there is none. Raises HoldfastError."""
        from holdfast.runtime.connection import dial

        options = self._options
        endpoint = Endpoint(host=leader.address, port=leader.port)
        dialling = asyncio.ensure_future(dial(endpoint, options.job, node, options.token))
        watching = asyncio.ensure_future(self._until_changed(leader))
        try:
            await asyncio.wait({dialling, watching}, return_when=asyncio.FIRST_COMPLETED)
            if dialling.done() and dialling.exception() is not None:
                await asyncio.wait({watching}, timeout=WATCH_S_MAX)
            if watching.done() and (not dialling.done() or dialling.exception() is not None):
                return None
            return dialling.result()
        except PortInUseError as error:  # the coordinator is gone: another program has its port now
            raise CoordinatorUnreachableError(str(error)) from None
        finally:
            for task in (dialling, watching):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(dialling, watching, return_exceptions=True)

    async def _until_changed(self, leader: Leader) -> None:
        while True:
            await asyncio.sleep(random.uniform(*WATCH_INTERVAL_S))
            with contextlib.suppress(EtcdError):
                if await run_detached(self._look) != leader:
                    return

    def _look(self) -> Leader | None:
        api = self._election.open_api()
        try:
            return api.leader()
        finally:
            api.close()

    # ---------------------------------------------------------------- leading

    async def _host(self, won: Won) -> None:
        options, lease_holder = self._options, won.lease_holder
        before = lease_holder.previous_leader
        machine = LeasedCoordinator(
            options.job,
            options.limits,
            self._judge,
            asyncio.get_running_loop().time(),
            holds=lease_holder.holds,
            floor=before.generation if before is not None else 0,
            tail_s=before.tail_s if before is not None else 0.0,
            examine=self._examine,
        )
        service = ElectedService(machine, lease_holder, self._journal, self._say, self._step_down)
        self._service, self._lease_holder = service, lease_holder
        await service.listen(won.place, options.token, static=False)
        lease_holder.start(service.look)
        self._journal.write(
            "elected",
            address=f"{won.leader.address}:{won.leader.port}",
            identity=won.leader.identity,
            floor=before.generation if before is not None else 0,
        )
        self._warn_of_loopback(won.leader)

    def _warn_of_loopback(self, leader: Leader) -> None:
        options, why = self._options, self._election.by_loopback
        if why and leader.address.startswith("127.") and leader.address != options.local_addr:
            self._say(f"{why}, so this node is known as {leader.address}, which others cannot reach; give --local-addr")

    def _step_down(self, reason: str) -> None:
        """Step down, because the lease is lost or soon will be: close every link without a message."""
        assert self._service is not None
        assert self._lease_holder is not None
        service, lease_holder = self._service, self._lease_holder
        self._service = None
        self._journal.write("steps_down", reason=reason)
        self._say(f"this node is no longer the coordinator: {reason}")

        async def leave() -> None:
            await service.close()
            await run_detached(lambda: lease_holder.leave(None))

        self._leaving = asyncio.ensure_future(leave())

"""The coordinator under a leader lease, in etcd or in another store's value: becoming it, being it, or dialing it.

`LeaseHolder` is the thread that keeps the lease, and reports what may be done on it at this moment. The lease is
measured on our own clock, from the start of the last call that renewed it; etcd counts from later, so ours always ends
first. The clock continues while the process is stopped or the machine sleeps.

`ElectedService` is the coordinator's shell: it sends messages only while the lease is fresh, and starts a new
generation only when its number was written into the storage for the next leader.

`ElectedClient` connects this process: it dials the agent that holds the lease, or takes the lease. It binds first and
publishes after. The agent machine decides when to try again and when to give up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from holdfast.authority.leased import Leased
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.coordinator_commands import Command, DropLink, Tell
from holdfast.coordinator.ending import Judge
from holdfast.detached import run_detached
from holdfast.journal import Journal
from holdfast.protocol.errors import CoordinatorUnreachableError, EtcdError, EtcdUnreachableError, PortInUseError
from holdfast.protocol.extension import CoordinatorHalf
from holdfast.protocol.messages import Assign, Finish, Start
from holdfast.protocol.options import Endpoint, RunOptions
from holdfast.protocol.policy import Limits, NodeSpec
from holdfast.rendezvous.bind import Claim, claim
from holdfast.rendezvous.elections import Api, Election, Leader, LeaderLease, Memory
from holdfast.runtime.coordinator_service import CoordinatorLink, CoordinatorService

RENEWALS_PER_LEASE = 5
HELD_PER_LEASE = 0.8
"""Share of the lease without a renewal after which we step down. The rest is the margin before another agent can take
it."""
FRESH_PER_LEASE = 0.4
"""Share of the lease without a renewal after which nothing is sent until it is renewed: each answer of ours would begin
the fence of an agent that may outlive our lease."""
RETRY_S = 0.1
"""Time from a renewal that failed to the next one (s)."""
RESIGN_S_MAX = 3.0
"""Limit for giving the key back at the end (s). etcd may be unreachable, and then the lease runs out."""


def clock_s() -> float:
    """The time on a clock that continues while the machine sleeps (s)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseHolder:
    """Keeps the lease in a thread. `on_news` is called on the loop after every renewal and once when the key is
    lost."""

    def __init__(
        self, api: Api, leader_lease: LeaderLease, ttl_s: float, began_s: float, clock: Callable[[], float] = clock_s
    ) -> None:
        """`began_s`: the time, by `clock`, at which the call that took the key began."""
        self._api = api
        self._leader_lease = leader_lease
        self._ttl_s = ttl_s
        self._clock = clock
        self._renewed_s = began_s
        """The time at which the newest call began that has renewed the lease (s of `clock`)."""
        self._over = ""
        """The reason why the lease is over; empty: it is not, as far as is known."""
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holdfast-etcd-lease", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_news: Callable[[], None] = _nothing
        self.previous_leader = leader_lease.previous_leader

    def start(self, on_news: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_news = on_news
        self._thread.start()

    @property
    def over(self) -> str:
        """The reason why the lease is over; empty: it is not. Once over it stays over, even if a late answer of etcd
        renews it."""
        with self._lock:
            age_s = self._clock() - self._renewed_s
            if not self._over and age_s >= HELD_PER_LEASE * self._ttl_s:
                self._over = f"the coordinator's lease could not be renewed for {age_s:.1f} s"
            return self._over

    def holds(self) -> bool:
        """Whether we still lead."""
        return not self.over

    def fresh(self) -> bool:
        """Whether messages may be sent now."""
        return not self.over and self._clock() - self._renewed_s < FRESH_PER_LEASE * self._ttl_s

    def left_s(self) -> float:
        """Seconds until we have to step down, unless the lease is renewed."""
        return max(0.0, self._renewed_s + HELD_PER_LEASE * self._ttl_s - self._clock())

    def workers_may_live_s(self, fence_s: float) -> float:
        """The time after the end of our key for which a worker may still live (s), if its agent's last answer came from
        us: that agent's fence began while our lease was fresh."""
        return max(0.0, fence_s - (1 - FRESH_PER_LEASE) * self._ttl_s)

    def remember(self, memory: Memory, done: Callable[[bool], None]) -> None:
        """Write the memory for the next leader. Calls `done(True)` on the loop when it is written, `done(False)` when
        it could not be."""

        def job() -> None:
            written = False
            with contextlib.suppress(EtcdError):
                written = self._leader_lease.remember(memory)
                if not written:
                    self._lose("another agent owns the coordinator's key now")
            self._call_on_loop(lambda: done(written))

        self._jobs.put(job)

    def leave(self, memory: Memory | None, *, forget: bool = False) -> None:
        """Give the key back with this last memory, and end the thread. Blocks for at most RESIGN_S_MAX.

        `forget`: the job is over, and leaves no memory. Without a memory and without `forget` the lease runs out.
        """

        def job() -> None:
            with contextlib.suppress(EtcdError):
                self._leader_lease.resign(None if forget else memory)

        if (memory is not None or forget) and self.holds():
            self._jobs.put(job)
        with self._lock:
            self._over = self._over or "resigned"
        self._jobs.put(None)
        if self._thread.ident is None:  # this process was told to end before its port listened
            self._thread.start()
        self._thread.join(RESIGN_S_MAX)

    def _run(self) -> None:
        renew_at_s = self._renewed_s + self._ttl_s / RENEWALS_PER_LEASE
        while True:
            wait_s = None if renew_at_s == inf else max(0.001, renew_at_s - self._clock())
            try:
                job = self._jobs.get(timeout=wait_s)
            except queue.Empty:
                renew_at_s = self._renew()
                continue
            if job is None:
                break
            job()
        self._api.close()

    def _renew(self) -> float:
        """Renew the lease. Returns the time of the next renewal (s of `clock`); inf: the lease is over."""
        if self.over:
            return inf
        began_s = self._clock()
        try:
            ours = self._leader_lease.renew()
        except EtcdError:
            return self._clock() + RETRY_S
        if not ours:
            self._lose("the coordinator's lease has run out or was taken away")
            return inf
        if self.over:  # the answer came too late to count
            return inf
        with self._lock:
            self._renewed_s = began_s
        self._call_on_loop(self._on_news)
        return began_s + self._ttl_s / RENEWALS_PER_LEASE

    def _lose(self, why: str) -> None:
        with self._lock:
            self._over = self._over or why
        self._call_on_loop(self._on_news)

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call)


def _nothing() -> None:
    """The default callback, which does nothing."""


class ElectedService(CoordinatorService):
    """Runs a coordinator under a lease. `on_over(reason)` is called once when the leadership is lost."""

    def __init__(
        self,
        machine: Coordinator,
        lease_holder: LeaseHolder,
        journal: Journal,
        say: Callable[[str], None],
        on_over: Callable[[str], None],
    ) -> None:
        self._lease_holder = lease_holder
        self._elected = machine
        self._on_over: Callable[[str], None] | None = on_over
        self._outbox: deque[Tell | DropLink] = deque()
        """Commands that wait for a fresh lease, or for the memory of a generation, in order."""
        self._remembered = 0
        """The newest generation that is written for the next leader."""
        self._remembering = False
        """A generation is being written."""
        super().__init__(machine, journal, say)
        self._timer = asyncio.get_running_loop().call_later(lease_holder.left_s(), self.look)

    def look(self) -> None:
        """Check the lease. Called when it was renewed or lost, and when its time may be over."""
        if self._on_over is None:
            return
        self._timer.cancel()
        reason = self._lease_holder.over
        if reason:
            on_over, self._on_over = self._on_over, None
            self._outbox.clear()
            on_over(reason)
            return
        self._timer = asyncio.get_running_loop().call_later(self._lease_holder.left_s(), self.look)
        self._flush()

    def final_record(self) -> Memory | None:
        """The memory for the next leader when we step down by ourselves; None: no generation was ever started."""
        machine = self._elected
        generation = max(machine.newest_generation, self._remembered)
        if not generation:
            return self._lease_holder.previous_leader
        workers_may_live_s = fence_s(machine.limits) if machine.workers_may_live else 0.0
        return Memory(run_id=machine.job.run_id, generation=generation, workers_may_live_s=workers_may_live_s)

    async def close(self) -> None:
        self._on_over = None
        self._timer.cancel()
        await super().close()

    def _execute(self, command: Command) -> None:
        match command:
            # The end was decided while the lease held, and starts nothing. It needs no fresh lease.
            case Tell(_, Finish()):
                super()._execute(command)
            case Tell() | DropLink():
                self._outbox.append(command)
                self._flush()
            case _:
                super()._execute(command)

    def _flush(self) -> None:
        """Execute the commands that wait, as far as the lease allows. A generation must be in the memory before any
        agent gets it: the next leader's fence and numbers depend on it."""
        while self._outbox and self._lease_holder.fresh() and not self._remembering:
            command = self._outbox[0]
            if isinstance(command, Tell) and isinstance(command.message, Assign | Start):
                generation = command.message.generation
                if generation > self._remembered:
                    self._remember(generation)
                    return
            self._outbox.popleft()
            super()._execute(command)

    def _remember(self, generation: int) -> None:
        self._remembering = True
        limits = self._elected.limits
        workers_may_live_s = self._lease_holder.workers_may_live_s(fence_s(limits))

        def done(written: bool) -> None:
            self._remembering = False
            if written:
                self._remembered = generation
                self._flush()
            # else: the next renewal tries again, or reports that we lost the leadership

        self._lease_holder.remember(
            Memory(run_id=self.machine.job.run_id, generation=generation, workers_may_live_s=workers_may_live_s), done
        )


def fence_s(limits: Limits) -> float:
    """The longest time from the last answer of a coordinator until no worker of its agents is alive."""
    return limits.fence_s + limits.kill_s


WATCH_INTERVAL_S = (0.15, 0.35)
"""Range of the time between two reads of the key while its holder does not answer (s). It is random, so that agents do
not read all at once."""
WATCH_S_MAX = 2.0
"""Time after a failed dial for which the key is watched, before the attempt counts as failed (s)."""
SEEK_S_MAX = 15.0
"""Limit for one search for the leader, with all its calls (s): another store's calls may hang for ever."""
TURNS_MAX = 8
"""Number of leaders that are found and lost in one attempt before it counts as failed."""


class Won(NamedTuple):
    """A won election: the key is ours, and the socket that it names listens."""

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
        extensions: Sequence[CoordinatorHalf] = (),
    ) -> None:
        self._extensions = extensions
        self._options = options
        self._election = election
        self._judge = judge
        self._journal = journal
        self._say = say
        self._service: ElectedService | None = None
        self._lease_holder: LeaseHolder | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._notice = ""
        """The newest notice of the storage that was shown."""
        self._was_linked = False
        """This node has had a link to some coordinator: the command line and the storage are valid."""

    @property
    def leading(self) -> ElectedService | None:
        """The coordinator here, while this process surely has the lease: another one may lead afterwards."""
        return self._service if self._lease_holder is not None and self._lease_holder.fresh() else None

    async def connect(self, node: NodeSpec) -> CoordinatorLink:
        """Make one attempt. Raises HoldfastError; once the job was reached, a refusal by the storage is no reason to
        end."""
        try:
            link = await self._connect(node)
        except EtcdError as error:
            if self._was_linked and not isinstance(error, EtcdUnreachableError):
                raise EtcdUnreachableError(str(error)) from None
            raise
        self._was_linked = True
        return link

    async def _connect(self, node: NodeSpec) -> CoordinatorLink:
        if self._leaving is not None:
            # Agents have links to the coordinator that was here until these are closed. That must come to its end, even
            # if this attempt is cancelled.
            await asyncio.shield(self._leaving)
        for _ in range(TURNS_MAX):
            if self._service is not None:
                return self._service.connect_locally()
            try:
                async with asyncio.timeout(SEEK_S_MAX):
                    found = await run_detached(self._seek)
            except TimeoutError:
                raise EtcdUnreachableError(f"the leader could not be found within {SEEK_S_MAX:g} s") from None
            if isinstance(found, Won):
                await self._host(found)
                continue
            link = await self._dial_while_in_charge(found, node)
            if link is not None:
                return link
        raise CoordinatorUnreachableError(f"the coordinator changed {TURNS_MAX} times while a connection was attempted")

    async def close(self) -> None:
        if self._service is not None and self._lease_holder is not None:
            service, lease_holder = self._service, self._lease_holder
            self._service = None
            await service.close()
            forget = service.machine.outcome is not None
            record = service.final_record()
            await run_detached(lambda: lease_holder.leave(record, forget=forget or record is None))
        if self._leaving is not None:
            await self._leaving

    # ---------------------------------------------------------------- seeking: blocks, in its own thread

    def _seek(self) -> Leader | Won:
        """Find the present leader; if there is none, try to become it."""
        api = self._election.open_api()
        if api.notice != self._notice:
            self._notice = api.notice
            self._say(api.notice)
        in_use = False
        try:
            leader = api.leader()
            if leader is None:
                won = self._campaign(api)
                if won is not None:
                    in_use = True  # the thread that keeps the lease goes on with it
                    return won
                leader = api.leader()  # of the agent that was faster
        finally:
            if not in_use:
                api.close()
        if leader is None:
            raise EtcdUnreachableError("the coordinator's key is changing its owner")
        return leader

    def _campaign(self, api: Api) -> Won | None:
        """Try to take the key; None: another agent has it. The socket is bound before, since the key names its port."""
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
        """Dial the leader as long as it has the key. Returns None if it has lost the key meanwhile. Raises
        HoldfastError."""
        from holdfast.runtime.connection import dial

        options = self._options
        endpoint = Endpoint(host=leader.address, port=leader.port)
        dialling = asyncio.ensure_future(dial(endpoint, options.job, node, options.token))
        watching = asyncio.ensure_future(self._until_changed(leader))
        try:
            await asyncio.wait({dialling, watching}, return_when=asyncio.FIRST_COMPLETED)
            # A leader that does not answer may have died: the key will then change its owner soon.
            if dialling.done() and dialling.exception() is not None:
                await asyncio.wait({watching}, timeout=WATCH_S_MAX)
            if watching.done() and (not dialling.done() or dialling.exception() is not None):
                return None
            return dialling.result()
        except PortInUseError as error:  # the coordinator is gone, and another program has its port now
            raise CoordinatorUnreachableError(str(error)) from None
        finally:
            for task in (dialling, watching):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(dialling, watching, return_exceptions=True)

    async def _until_changed(self, leader: Leader) -> None:
        while True:
            await asyncio.sleep(random.uniform(*WATCH_INTERVAL_S))
            with contextlib.suppress(EtcdError):  # a storage that does not answer says nothing about the leader
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
        now = asyncio.get_running_loop().time()
        authority = Leased(
            options.limits,
            now,
            holds=lease_holder.holds,
            newest_before=before.generation if before is not None else 0,
            workers_may_live_s=before.workers_may_live_s if before is not None else 0.0,
        )
        machine = Coordinator(options.job, options.limits, self._judge, now, authority, extensions=self._extensions)
        service = ElectedService(machine, lease_holder, self._journal, self._say, self._step_down)
        # Before the first await: if this attempt is cancelled there, `close` ends both.
        self._service, self._lease_holder = service, lease_holder
        await service.listen(won.place, options.token, static=False)
        lease_holder.start(service.look)
        self._journal.write(
            "elected",
            address=f"{won.leader.address}:{won.leader.port}",
            identity=won.leader.identity,
            newest_before=before.generation if before is not None else 0,
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

"""Connects an agent of a job whose nodes elect a successor when the coordinator is lost (c10d, more than one node).

`SuccessionClient` finds the coordinator wherever it is, founds the job if the endpoint is ours, and starts the
coordinator when this node's voter has won. While it leads, it keeps connections to witnesses, and calls the other
endpoints of the job: a node that returned there may have founded the job a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import structs

from holdfast.agent.voter import (
    AskVote,
    FounderMet,
    HeardOf,
    LeaderAddress,
    Leaves,
    PolledCame,
    PollFailed,
    Unlinked,
    Voter,
)
from holdfast.authority.voter_events import Deposed
from holdfast.authority.voters import Voters
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.coordinator_commands import StepDown
from holdfast.coordinator.ending import Judge
from holdfast.journal import Journal
from holdfast.protocol.charter import VOTERS_MIN, Poll, Polled, Renew, Seat, Succession
from holdfast.protocol.errors import (
    CoordinatorUnreachableError,
    HoldfastError,
    NoAnswerError,
    PortInUseError,
    RefusedError,
)
from holdfast.protocol.extension import CoordinatorHalf
from holdfast.protocol.messages import ContestEndpoint, CoordinatorAt, FromCoordinator
from holdfast.protocol.options import Endpoint, RunOptions
from holdfast.protocol.policy import NodeSpec
from holdfast.rendezvous.bind import Claim, claim_endpoint, open_port
from holdfast.runtime.connection import dial, dial_agent, nobody_listens, seen_from_here
from holdfast.runtime.coordinator_service import CoordinatorLink
from holdfast.runtime.replicated_service import Outgoing, ReplicatedService, WatchedLink
from holdfast.runtime.voter_service import Errands, Reception, VoterService
from holdfast.text import is_loopback

STAGGER_S = 0.05
"""Time between the first dials of the places where the coordinator may be (s): usually the first place answers before
another one is dialed."""
ELECTION_S_MAX = 2.0
"""Time for which an attempt is repeated during an election before it counts as failed (s)."""
RETRY_S = 0.05
"""Pause before an attempt is repeated during an election (s)."""
PATIENCE_S, PATIENCE_S_MAX = 0.5, 8.0
"""Limit for an attempt at several places (s), and its largest value; it doubles after each attempt without an answer. A
silent place must not delay the next attempt."""
ASK_S_MAX = 0.5
"""Limit for the other places to answer where the job lives, before a node founds it (s)."""
ASK_LEADER_S_MAX = 5.0
"""The same limit if this node knows of another coordinator (s)."""
CALL_FIRST_S, CALL_S = 0.25, 0.5
"""Pauses between two calls of an endpoint (s), in the first CALL_OFTEN_S of a coordinator and later. A node that
returned there forms the job again within settle_s when enough others have returned, and a call may be lost."""
CALL_OFTEN_S = 5.0


class SuccessionClient:
    """The client of one agent. Holds the coordinator while it runs in this process."""

    def __init__(
        self,
        options: RunOptions,
        judge: Judge,
        journal: Journal,
        say: Callable[[str], None],
        extensions: Sequence[CoordinatorHalf] = (),
    ) -> None:
        self._options = options
        self._judge = judge
        self._journal = journal
        self._say = say
        self._extensions = extensions
        self._loop = asyncio.get_running_loop()
        self._errands = Errands()
        self._node: NodeSpec | None = None
        self._voter: VoterService | None = None
        self._reception: Reception | None = None
        self._bound: set[Endpoint] = set()
        """Endpoints of the job at which this process listens."""
        self._place: Endpoint | None = None
        """The address of the coordinator at the other end of the newest link; None: it is this process, or unknown."""
        self._leader = ""
        """The name of the process there."""
        self._link: WatchedLink | None = None
        self._patience_s = PATIENCE_S
        self._leaves = False
        self.service: ReplicatedService | None = None
        """The coordinator in this process; None: there is none."""
        self.port = 0
        """The port at which this agent listens."""

    @property
    def term(self) -> int:
        """The newest term that this agent knows."""
        return self._voter.machine.term if self._voter is not None else 0

    @property
    def replaceable(self) -> bool:
        """Whether another node may take the coordinator's place."""
        return self._options.job.max_nodes + len(self._options.more_endpoints) >= VOTERS_MIN

    async def connect(self, node: NodeSpec) -> CoordinatorLink:
        """Make one attempt, or several while the voters elect. Raises HoldfastError or OSError."""
        if self._voter is None:
            await self._begin(node)
        assert self._voter is not None
        until_s = self._loop.time() + ELECTION_S_MAX
        while True:
            self._voter.news.clear()
            try:
                link = self._link_locally() or await self._seek(node, self._voter)
            except CoordinatorUnreachableError:
                if not self._voter.electing or self._loop.time() >= until_s:
                    raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._voter.news.wait()
            else:
                if link is not None:
                    return link

    def leaves(self) -> None:
        """Prevent that this node's voter stands for election, because the node leaves."""
        if self._voter is not None and not self._leaves:
            self._leaves = True
            self._voter.feed(Leaves())

    async def close(self) -> None:
        if self._voter is not None:
            self._voter.stop()  # it must not win an election while the coordinator here waits for its members
        if self.service is not None:
            await self.service.close()
        self._errands.cancel()
        if self._reception is not None:
            self._reception.close()

    # ---------------------------------------------------------------- this agent's own port

    async def _begin(self, node: NodeSpec) -> None:
        """Make the voter, and listen at this agent's own port and at the job's other endpoints that are ours."""
        options = self._options
        try:
            place = open_port(options.local_addr, options.agent_port, loopback=is_loopback(options.endpoint.host))
        except PortInUseError as error:
            raise PortInUseError(f"--agent-port: {error}") from None
        except OSError as error:
            text = f"cannot listen at port {options.agent_port} (--agent-port): {error.strerror or error}"
            raise PortInUseError(text) from None
        machine = Voter(node.agent, options.limits, self._loop.time(), stands=True)
        voter = VoterService(machine, self._journal, self._ask, partial(self._lead, node))
        reception = Reception(options, voter, self._where, self._say)
        await reception.listen(place)
        self._node, self._voter, self._reception, self.port = node, voter, reception, place.port
        self._journal.write("listens", addresses=place.addresses, port=place.port)
        for endpoint in options.more_endpoints:
            await self._bind(endpoint)
        self._errands.start(self._call_founders(voter))

    async def _bind(self, endpoint: Endpoint) -> bool:
        """Listen at an endpoint of the job, if it is this machine's and free. Returns whether it is."""
        place = await claim_endpoint(self._options, endpoint)
        if place.is_host:
            await self._listen(endpoint, place)
        return place.is_host

    async def _listen(self, endpoint: Endpoint, place: Claim) -> None:
        assert self._reception is not None
        self._bound.add(endpoint)
        await self._reception.listen(place)

    def _where(self) -> LeaderAddress | None:
        """The place of the coordinator, for others: that at the end of our link, or one that was elected since. None:
        unknown."""
        link, leader = self._link, self._voter.machine.leader if self._voter is not None else None
        if leader is not None and leader.term > (link.term if link is not None else 0):
            return leader
        if link is None or not link.up or self._place is None:
            return None
        return LeaderAddress(self._place.host, self._place.port, link.term)

    # ---------------------------------------------------------------- finding the coordinator

    def _link_locally(self) -> CoordinatorLink | None:
        if self.service is None:
            return None
        assert self._voter is not None
        self._place = None
        self._link = WatchedLink(self.service.connect_locally(), self._voter)
        # If the coordinator here has founded the job a second time, our own voter may know of the first one.
        voters, voter = self.service.voters, self._voter.machine
        report = voter.charter_report(self._loop.time(), "", voters.term, founded=voters.founded, forms=voters.forms)
        if report is not None:
            self._link.send(report)
        return self._link

    async def _seek(self, node: NodeSpec, voter: VoterService) -> CoordinatorLink | None:
        """Search for a link. Returns None if the voter has learned of another coordinator meanwhile, or if this process
        has the coordinator: the caller then begins again. Raises HoldfastError."""
        finding = asyncio.ensure_future(self._find(node, voter))
        news = asyncio.ensure_future(voter.news.wait())
        try:
            await asyncio.wait({finding, news}, return_when=asyncio.FIRST_COMPLETED)
            found = finding.result() if finding.done() else None
        finally:
            finding.cancel()
            news.cancel()
            await asyncio.gather(finding, news, return_exceptions=True)
        if found is None:
            return None
        self._patience_s = PATIENCE_S
        self._place = Endpoint(host=found.peer_address, port=found.peer_port)
        self._leader = found.accepted.name
        self._link = WatchedLink(found, voter)
        return self._link

    async def _find(self, node: NodeSpec, voter: VoterService) -> Outgoing | None:
        """Find the coordinator, or found the job if nobody else has it. Returns None if this process has founded it."""
        if voter.electing or not await self._owns_endpoint():
            return await self._first(self._places(voter), node)

        # This node may found the job. Its other nodes may have one already, if this one was started again.
        places = self._places(voter)
        limit_s = ASK_S_MAX if voter.machine.leader is None else ASK_LEADER_S_MAX
        with contextlib.suppress(HoldfastError, TimeoutError):
            async with asyncio.timeout(limit_s if places else None):
                return await self._first(places, node)
        self._host(node, Succession())
        return None

    async def _owns_endpoint(self) -> bool:
        """Whether this process listens at the endpoint, so that it may found the job."""
        options = self._options
        if options.endpoint not in self._bound:
            place = await claim_endpoint(options)
            self._journal.write("claim", endpoint=str(place.endpoint), host=place.is_host, reason=place.reason)
            if place.is_host:
                await self._listen(options.endpoint, place)
        return options.endpoint in self._bound

    def _places(self, voter: VoterService) -> list[Endpoint]:
        """Places at which the coordinator may be, the most likely one first."""
        leader, charter = voter.machine.leader, voter.machine.charter
        places = [Endpoint(host=leader.address, port=leader.port)] if leader is not None else []
        places += [self._place] if self._place is not None else []
        places += [each for each in (self._options.endpoint, *self._options.more_endpoints) if each not in self._bound]
        seats = charter.seats if charter is not None else ()
        places += [_endpoint(seat) for seat in seats if seat.name != voter.machine.name and not seat.witness]
        return list(dict.fromkeys(places))

    async def _first(self, places: list[Endpoint], node: NodeSpec) -> Outgoing:
        """A link by the first of these places that leads to the coordinator. Raises the error of the most likely
        place."""
        dials = [self._loop.create_task(self._dial(n * STAGGER_S, place, node)) for n, place in enumerate(places)]
        until_s = self._loop.time() + self._patience_s
        waiting, winner = set(dials), None
        try:
            while waiting and winner is None:
                left_s = None if len(dials) == 1 else until_s - self._loop.time()
                done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                winner = next((each for each in dials if each in done and each.exception() is None), None)
                if not done:
                    self._patience_s = min(2 * self._patience_s, PATIENCE_S_MAX)
                    break
        finally:
            # Without an await: a cancellation there would lose the winner's connection.
            for each in dials:
                if each is not winner:
                    each.cancel()
                    each.add_done_callback(_close_found)
        if winner is not None:
            return winner.result()
        if dials and dials[0].done() and (error := dials[0].exception()) is not None:
            raise error
        raise CoordinatorUnreachableError(f"no answer from {places[0]}" if places else "no other node is known")

    async def _dial(self, pause_s: float, place: Endpoint, node: NodeSpec) -> Outgoing:
        options = self._options
        await asyncio.sleep(pause_s)
        try:
            connection = await dial(place, options.job, node, options.token)
        except (RefusedError, PortInUseError) as error:
            # Before this node was part of the job, a refusal at the endpoint is a mistake of the user. Later, the port
            # belongs to another job or program by now.
            if place == options.endpoint and self._place is None and not self._bound:
                raise
            raise CoordinatorUnreachableError(str(error)) from None

        accepted, voter = connection.accepted, self._voter
        assert voter is not None
        now, founder = self._loop.time(), (accepted.name, accepted.term)
        report = voter.machine.charter_report(now, *founder, founded=accepted.founded, forms=accepted.forms)
        if report is not None:
            connection.send(report)
        if voter.machine.ignores(now, *founder, founded=accepted.founded):
            connection.close()
            raise CoordinatorUnreachableError(
                f"the node at {place} started this job a second time; this coordinator continues"
            )
        return connection

    async def _call_founders(self, voter: VoterService) -> None:
        """Call the endpoint while this node's voter follows a coordinator elsewhere, and tell a process that starts the
        job again there of that coordinator."""
        machine, endpoint, found_there = voter.machine, self._options.endpoint, 0
        while True:
            await asyncio.sleep(CALL_S)
            # The coordinator of most jobs is at the endpoint; to find it there once in each term is enough.
            if not machine.calls or machine.term == found_there or endpoint in self._bound:
                continue
            try:
                connection = await self._dial_agent(endpoint)
            except (HoldfastError, OSError):
                continue  # no process is there
            accepted = connection.accepted
            if accepted.name == self._leader:
                found_there = machine.term
            elif accepted.forms and machine.calls:
                about = accepted.name, accepted.term
                report = machine.charter_report(
                    self._loop.time(), *about, founded=accepted.founded, forms=accepted.forms
                )
                if report is not None:
                    connection.send(report)
                    voter.feed(FounderMet())
            connection.close()

    # ---------------------------------------------------------------- votes

    def _ask(self, question: AskVote) -> None:
        self._errands.start(self._ask_vote(question))

    async def _ask_vote(self, question: AskVote) -> None:
        """Ask another voter for its vote. Ends in one event of the voter: PolledCame or PollFailed."""
        assert self._voter is not None
        assert self._node is not None
        seat, poll = question.seat, question.poll
        answer: asyncio.Future[Polled | None] = self._loop.create_future()

        def end(polled: Polled | None) -> None:
            if not answer.done():
                answer.set_result(polled)

        polled, refused = None, False
        try:
            async with asyncio.timeout(self._options.limits.poll_s):
                connection = await self._dial_agent(_endpoint(seat))
                try:
                    connection.start(
                        lambda message: end(message) if isinstance(message, Polled) else None, lambda _: end(None)
                    )
                    connection.send(poll)
                    polled = await answer
                finally:
                    connection.close()
        except CoordinatorUnreachableError:
            refused = True
        except (HoldfastError, TimeoutError):
            pass  # no answer proves nothing: that voter may be alive
        if polled is not None:
            self._voter.feed(PolledCame(seat.name, poll, polled))
        else:
            self._voter.feed(PollFailed(seat.name, poll, gone=refused and await self.prove_gone(seat)))

    async def _dial_agent(self, endpoint: Endpoint) -> Outgoing:
        assert self._node is not None
        return await dial_agent(endpoint, self._options.job, self._node, self._options.token)

    # ---------------------------------------------------------------- leading

    def _lead(self, node: NodeSpec, succession: Succession) -> None:
        """Start the coordinator here, because this node's voter was elected."""
        charter = succession.charter
        assert charter is not None
        if self.service is not None:  # this node has founded the job meanwhile
            self.service.deposed(Deposed(succession.term, "", 0))
        if self.service is not None:  # it does not step down: the election is void
            assert self._voter is not None
            self._voter.feed(Unlinked(succession.term, closed=False, local=True))
            return
        before = charter.led_from.node.host if charter.led_from is not None else charter.voters[0].host
        self._say(f"this node is the coordinator now (term {succession.term}): lost {before}, which had it")
        self._host(node, succession)

    def _host(self, node: NodeSpec, succession: Succession) -> None:
        assert self._reception is not None
        options = self._options
        others = [each for each in (options.endpoint, *options.more_endpoints) if each not in self._bound]
        now, places = self._loop.time(), [(each.host, each.port) for each in others]
        voters = Voters(options.limits, now, node, succession, places=places)
        machine = Coordinator(options.job, options.limits, self._judge, now, voters, extensions=self._extensions)
        service = self.service = ReplicatedService(machine, voters, self._journal, self._say, self)
        self._reception.connected = service.connected
        self._reception.leading = lambda accepted: structs.replace(
            accepted, term=voters.term, founded=voters.founded, forms=voters.forms
        )
        self._journal.write("leads", term=succession.term, founds=succession.charter is None)
        for endpoint in others:
            service.errands.start(self._watch(service, endpoint))

    def stepped_down(self, command: StepDown) -> None:
        """End the coordinator in this process: it has no authority any more."""
        assert self._voter is not None
        assert self._reception is not None
        service, self.service = self.service, None
        assert service is not None
        self._reception.connected = None
        self._say(f"this node is not the coordinator any more: {command.reason}")
        # While we led, the voter here has voted for nobody, and it may not hold the newest charter.
        voters = service.voters
        if voters.charter.voters:
            self._voter.renew_came(Renew(voters.term, 0, voters.charter), lambda _: None)
        self._voter.feed(Unlinked(voters.term, closed=False, local=True, aside=command.aside))
        if self._link is not None:
            self._link.stepped_down()
        if command.port:
            service.announce(CoordinatorAt(command.term, command.address, command.port))
            self._voter.feed(HeardOf(command.term, command.address, command.port))
        service.cut(command.reason)

    def poll_came(self, poll: Poll, answer: Callable[[Polled], None]) -> None:
        assert self._voter is not None
        self._voter.poll_came(poll, answer)

    async def prove_gone(self, seat: Seat) -> bool:
        """Whether the process of this voter has ended: its machine answers, and no process listens there, or another
        one does."""
        endpoint = _endpoint(seat)
        try:
            if await nobody_listens(endpoint, self._options.limits.poll_s):
                return True
            connection = await self._dial_agent(endpoint)
        except NoAnswerError:  # a stopped process is silent, too
            return False
        except (RefusedError, PortInUseError):  # another job or another program has the port now
            return True
        except HoldfastError:
            return False
        connection.close()
        return connection.accepted.name != seat.name

    async def find_caller(self, contest: ContestEndpoint) -> Deposed | None:
        """Dial the coordinator that has called. Returns it as the reason to step down; None: it is not at that place.
        A late call must not depose the living coordinator."""
        endpoint = Endpoint(host=contest.address, port=contest.port)
        try:
            connection = await self._dial_agent(endpoint)
        except HoldfastError:
            return None
        connection.close()
        accepted = connection.accepted
        if accepted.absent or accepted.witness or accepted.name != contest.name:
            return None
        about = accepted.name, not accepted.founded, accepted.forms
        return Deposed(accepted.term, contest.address, contest.port, *about)

    # ---------------------------------------------------------------- the endpoints of the job, while leading

    async def _watch(self, service: ReplicatedService, endpoint: Endpoint) -> None:
        """Listen at this endpoint if it is this machine's; else keep the connection to a witness there, or call."""
        began_s, reported = self._loop.time(), ""
        while True:
            try:
                if await self._bind(endpoint):
                    service.no_witness(endpoint)
                    return
                connection = await self._dial_agent(endpoint)
                try:
                    await self._talk(service, connection, endpoint)
                finally:
                    connection.close()
            except RefusedError as error:
                service.no_witness(endpoint)
                if str(error) != reported:
                    reported = str(error)
                    self._say(f"no witness for this job at {endpoint}: {reported}")
            except (HoldfastError, OSError):
                service.no_witness(endpoint)  # no process is there yet
            often = self._loop.time() < began_s + CALL_OFTEN_S
            await asyncio.sleep(CALL_FIRST_S if often else CALL_S)

    async def _talk(self, service: ReplicatedService, connection: Outgoing, endpoint: Endpoint) -> None:
        """Serve a witness until its connection ends, or call the agent at this endpoint once."""
        closed: asyncio.Future[None] = self._loop.create_future()

        def end(_: str = "") -> None:
            if not closed.done():
                closed.set_result(None)

        accepted = connection.accepted
        if accepted.witness:
            seat = Seat(accepted.name, endpoint.host, connection.peer_address, endpoint.port, witness=True)
            service.witness_opened(connection, seat, end)
            await closed
            return
        service.no_witness(endpoint)
        connection.start(partial(self._answered, service, connection), end)
        address = self._options.local_addr or connection.local_address
        connection.send(service.voters.contest(address, self.port))
        await asyncio.wait({closed}, timeout=self._options.limits.poll_s)

    def _answered(self, service: ReplicatedService, connection: Outgoing, message: FromCoordinator) -> None:
        if isinstance(message, CoordinatorAt):
            address = seen_from_here(message.address, connection.peer_address)
            service.deposed(Deposed(message.term, address, message.port, message.name, message.elected))


def _close_found(dial: asyncio.Task[Outgoing]) -> None:
    """Close the connection of a dial that has succeeded although it is not needed."""
    if not dial.cancelled() and dial.exception() is None:
        dial.result().abort()


def _endpoint(seat: Seat) -> Endpoint:
    return Endpoint(host=seat.address, port=seat.port)

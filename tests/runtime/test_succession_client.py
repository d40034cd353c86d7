"""The shells of succession, with real sockets on loopback: who is told what at an agent's port, and votes over the wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from holdfast.agent.voter import AskVote, PolledCame, PollFailed, Unlinked, VoterState
from holdfast.authority.voter_events import Deposed
from holdfast.coordinator.world import Phase
from holdfast.journal import Journal
from holdfast.protocol.charter import Charter, CharterPosition, Poll, Polled, Renew, Seat
from holdfast.protocol.errors import CoordinatorUnreachableError, PortInUseError, RefusedError
from holdfast.protocol.messages import ContestEndpoint, CoordinatorAt, FromCoordinator, Join, Joined
from holdfast.protocol.options import CommandKind, Endpoint, LogOptions, RunOptions, WorkerCommand
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec
from holdfast.rendezvous.bind import claim
from holdfast.runtime.connection import dial, dial_agent
from holdfast.runtime.coordinator_service import CoordinatorLink
from holdfast.runtime.succession import SuccessionClient
from holdfast.runtime.witness_service import Witness
from tests.runtime.peers import TOKEN, service, settled
from tests.support.limits import limit_s
from tests.support.ports import free_port
from tests.support.simulator.nodes import simple_judge

JOB = JobSpec(run_id="j", min_nodes=1, max_nodes=3, backend="c10d")
PATIENT = Limits(lease_s=3600.0, fence_s=2400.0)


class Agent:
    """A SuccessionClient that has joined, and what its coordinator sent."""

    def __init__(
        self,
        name: str,
        endpoints: list[Endpoint],
        token: bytes | None = None,
        port: int = 0,
        limits: Limits = PATIENT,
    ) -> None:
        first, *more = endpoints
        self.node = NodeSpec(member=f"{name}#1", host=name, nproc=1)
        self.options = RunOptions(
            job=JOB,
            limits=limits,
            nproc=1,
            command=WorkerCommand(kind=CommandKind.PROGRAM, target="true"),
            logs=LogOptions(log_dir=None),
            endpoint=first,
            more_endpoints=tuple(more),
            succession=True,
            agent_port=port,
            token=token,
        )
        self.lines: list[str] = []
        self.client = SuccessionClient(self.options, simple_judge, Journal(None), self.lines.append)
        self.heard: list[FromCoordinator] = []
        self.lost: list[str] = []
        self.link: CoordinatorLink | None = None

    async def join(self) -> None:
        self.link = await self.client.connect(self.node)
        self.link.start(self.heard.append, self.lost.append)
        self.link.send(Join(self.node, port=self.client.port, term=self.client.term))
        await settled(lambda: any(isinstance(each, Joined) for each in self.heard))

    @property
    def place(self) -> Endpoint:
        return Endpoint(host="127.0.0.1", port=self.client.port)

    @property
    def seat(self) -> Seat:
        return Seat(self.node.agent, self.node.host, "127.0.0.1", self.client.port)

    @property
    def voter(self):  # type: ignore[no-untyped-def]
        assert self.client._voter is not None
        return self.client._voter

    def holds(self, charter: Charter) -> None:
        self.voter.renew_came(Renew(charter.position.term, 1, charter), lambda _: None)


@contextlib.asynccontextmanager
async def agents(*names: str, token: bytes | None = None) -> AsyncIterator[list[Agent]]:
    """Agents of one job; the first has the coordinator."""
    endpoint = free_endpoint()
    made = [Agent(name, [endpoint], token) for name in names]
    try:
        for each in made:
            await each.join()
        yield made
    finally:
        for each in made:
            await each.client.close()


def free_endpoint() -> Endpoint:
    return Endpoint(host="127.0.0.1", port=free_port())


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_an_agent_tells_where_the_coordinator_is(token: bytes | None) -> None:
    async with agents("a", "b", token=token) as (a, b):
        at_b = await dial_agent(b.place, JOB, b.node, token)
        assert at_b.accepted.absent
        assert at_b.accepted.name == b.node.agent
        at_b.abort()
        found = await dial(b.place, JOB, b.node, token)
        assert found.peer_port == a.options.endpoint.port
        assert not found.accepted.absent
        found.abort()


async def test_an_agent_that_knows_of_no_coordinator_says_so() -> None:
    async with agents("a", "b") as (a, b):
        await a.client.close()
        await settled(lambda: bool(b.lost))
        with pytest.raises(CoordinatorUnreachableError, match="no other is known yet"):
            await dial(b.place, JOB, b.node)


async def test_without_the_token_an_agents_port_says_nothing() -> None:
    async with agents("a", "b", token=TOKEN) as (_, b):
        for token in (None, b"another"):
            with pytest.raises(RefusedError, match="token"):
                await dial_agent(b.place, JOB, b.node, token)


async def test_a_port_of_its_own_that_is_taken_is_named_with_its_option() -> None:
    with contextlib.closing(claim(Endpoint(host="127.0.0.1", port=0))) as taken:
        client = Agent("a", [free_endpoint()], port=taken.port).client
        with pytest.raises(PortInUseError, match=f"--agent-port: .*:{taken.port}"):
            await client.connect(NodeSpec(member="a#1", host="a", nproc=1))
        await client.close()


async def test_who_joins_where_no_coordinator_is_is_sent_away() -> None:
    async with agents("a", "b") as (_, b):
        connection = await dial_agent(b.place, JOB, b.node)
        closed: list[str] = []
        connection.start(lambda _: None, closed.append)
        connection.send(Join(b.node))
        await settled(lambda: bool(closed))


async def test_a_call_is_answered_by_whom_knows_a_newer_term_and_heard_by_others() -> None:
    async with agents("a", "b") as (_, b):
        heard: list[FromCoordinator] = []
        for term, answer in ((5, []), (3, [CoordinatorAt(5, "127.0.0.1", 4000)])):
            connection = await dial_agent(b.place, JOB, b.node)
            closed: list[str] = []
            connection.start(heard.append, closed.append)
            connection.send(ContestEndpoint(term, "127.0.0.1", 4000))
            await settled(lambda closed=closed: bool(closed))
            assert heard == answer
        assert b.voter.machine.leader.term == 5


async def test_votes_over_the_wire() -> None:
    """b has lost the coordinator, c has not, d is gone, and at e's port another one answers."""
    async with agents("a", "b", "c") as (_, b, c):
        charter = Charter(CharterPosition(1, 99), (b.seat, c.seat, Seat("x#1", "x", "127.0.0.1", 9)))
        for each in (b, c):
            each.holds(charter)
        assert b.link is not None
        b.link.close("no answer")
        asked: list[object] = []
        feed, c.voter.feed = c.voter.feed, asked.append
        poll = Poll(2, c.seat, charter.position)
        for seat in (
            b.seat,
            Seat("d#1", "d", "127.0.0.1", free_endpoint().port),
            Seat("e#1", "e", "127.0.0.1", b.client.port),
        ):
            await c.client._ask_vote(AskVote(seat, poll))
        c.voter.feed = feed
        granted, failed, other = (each for each in asked if isinstance(each, PolledCame | PollFailed))
        assert granted.polled.granted
        assert granted.name == granted.polled.voter == b.node.agent
        assert failed == PollFailed("d#1", poll, gone=True)
        assert other.polled.voter != "e#1"


async def test_a_process_is_proved_to_have_ended_and_silence_proves_nothing() -> None:
    async def say_nothing(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async def say_hello(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 hello\r\n")
        await writer.drain()

    async with agents("a", "b") as (a, b), service(say_hello) as stranger:
        for seat, gone in (
            (b.seat, False),
            (Seat("earlier#1", "b", "127.0.0.1", b.client.port), True),
            (Seat("b#1", "b", "127.0.0.1", free_endpoint().port), True),
            (Seat("b#1", "b", "127.0.0.1", stranger.port), True),
        ):
            assert await a.client.prove_gone(seat) is gone, seat


async def test_the_successor_is_found_by_those_who_stay() -> None:
    """The coordinator's process ends: one of the other two has the coordinator, and both join it."""
    async with agents("a", "b", "c") as (a, b, c):
        charter = Charter(
            CharterPosition(1, 9), (a.seat, b.seat, c.seat), generation=1, nodes=(a.seat.name, b.seat.name, c.seat.name)
        )
        for each in (b, c):
            each.holds(charter)
        assert a.client.service is not None
        a.client.service.cut("killed")
        for listener in a.client._reception._listeners:
            listener.close()
        await settled(lambda: bool(b.lost) and bool(c.lost))
        b.heard.clear(), c.heard.clear()
        async with asyncio.timeout(limit_s(20.0)):
            await asyncio.gather(b.join(), c.join())
        assert (b.client.service is None) != (c.client.service is None)
        terms = {each.term for agent in (b, c) for each in agent.heard if isinstance(each, Joined)}
        assert terms == {b.client.term} == {c.client.term}
        assert any("this node is the coordinator now" in line for line in (*b.lines, *c.lines))


async def test_while_it_has_the_coordinator_a_node_votes_for_nobody() -> None:
    """Its own agent may have lost the link, as after a standstill: the coordinator decides all the same."""
    async with agents("a") as (a,):
        assert a.link is not None
        a.link.close("no answer for 4 s")
        poll = Poll(9, Seat("b#1", "b", "127.0.0.1", 9), CharterPosition(9, 9), final=True)
        answers: list[Polled] = []
        a.voter.poll_came(poll, answers.append)
        assert not answers[-1].granted
        service = a.client.service
        assert service is not None
        service.deposed(Deposed(9, "127.0.0.1", 9))
        a.voter.poll_came(poll, answers.append)
        assert answers[-1].granted


async def test_who_joins_a_coordinator_in_its_process_that_steps_down_follows_nobody() -> None:
    """Its answer is still on the way then: the voter must vote, and not follow for ever."""
    a = Agent("a", [free_endpoint()])
    try:
        link = await a.client.connect(a.node)
        link.start(a.heard.append, a.lost.append)
        assert a.client.service is not None
        link.send(Join(a.node, port=a.client.port))
        asyncio.get_running_loop().call_soon(a.client.service.deposed, Deposed(9, "", 0))
        await settled(lambda: bool(a.lost))
        assert any(isinstance(message, Joined) for message in a.heard)
        assert a.voter.machine.stage is VoterState.ALONE
    finally:
        await a.client.close()


async def test_a_founder_that_hears_of_a_newer_coordinator_steps_down_and_goes_there() -> None:
    async with agents("a") as (a,), agents("b") as (b,):
        assert a.client.service is not None
        calls = await dial_agent(a.options.endpoint, JOB, b.node)
        calls.start(lambda _: None, lambda _: None)
        calls.send(ContestEndpoint(7, "127.0.0.1", b.options.endpoint.port, b.node.agent))
        await settled(lambda: bool(a.lost))
        assert a.client.service is None
        await a.join()
        assert a.link is not None
        assert a.client.service is None
        assert b.client.service is not None
        calls.abort()


async def test_a_witness_with_another_token_does_not_vote_and_the_user_is_told_once() -> None:
    place = claim(Endpoint(host="127.0.0.1", port=0))
    said: list[str] = []
    witness = Witness(place, b"another" + TOKEN, PATIENT, "w", said.append)
    await witness.start()
    a = Agent("a", [free_endpoint(), place.endpoint], TOKEN)
    try:
        await a.join()
        await settled(lambda: len(said) > 1)
        differ = "the job token of 'a' (this node) and that of the coordinator or witness differ"
        assert a.lines == [f"no witness for this job at {place.endpoint}: {differ}"]
    finally:
        await a.client.close()
        witness.close()


async def test_a_founder_hears_of_an_older_job_and_is_joined_when_its_voters_have_ended() -> None:
    async def say_nothing(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with agents("a") as (a,):
        b = Agent("b", [a.options.endpoint])
        try:
            async with service(say_nothing) as silent:
                await b.client._begin(b.node)
                others = (Seat(f"{name}#1", name, silent.host, silent.port) for name in "cd")
                older = Charter(CharterPosition(3, 9), (b.seat, *others), generation=7, restarts=2)
                b.holds(older)
                b.voter.feed(Unlinked(3, closed=False))
                with pytest.raises(CoordinatorUnreachableError):
                    await b.client.connect(b.node)
                assert a.client.service is not None
                machine, voters = a.client.service.machine, a.client.service.voters
                assert (voters.older, voters.founded, machine.budget.used) == (older, True, 2)
            await settled(lambda: not voters.founded)
            await b.join()
            assert b.client.service is None
        finally:
            await b.client.close()


@contextlib.asynccontextmanager
async def far_away(place: Endpoint, arrives: asyncio.Event) -> AsyncIterator[Endpoint]:
    """The same witness, whose second message arrives late: the first one accepts the connection."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, waits: asyncio.Event | None) -> None:
        first = True
        while data := await reader.read(65536):
            if waits is not None and not first:
                await waits.wait()
            writer.write(data)
            first = False
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection(place.host, place.port)
        await asyncio.gather(copy(reader, outer, None), copy(inner, writer, arrives))

    async with service(relay) as there:
        yield Endpoint(host=there.host, port=there.port)


async def test_a_founder_waits_for_a_slow_witness_before_it_forms_a_generation() -> None:
    place, arrives = claim(Endpoint(host="127.0.0.1", port=0)), asyncio.Event()
    witness = Witness(place, None, PATIENT, "w", lambda _: None)
    await witness.start()
    async with far_away(place.endpoint, arrives) as slow:
        endpoint = free_endpoint()
        made = [Agent(name, [endpoint, slow], limits=structs.replace(PATIENT, poll_s=3600.0)) for name in "abc"]
        try:
            lone = Seat("a#0", "a", endpoint.host, endpoint.port)
            older = Charter(CharterPosition(3, 9), (lone,), generation=7, restarts=2)
            before = await dial_agent(place.endpoint, JOB, made[0].node)
            kept: list[FromCoordinator] = []
            before.start(kept.append, lambda _: None)
            before.send(Renew(3, 1, older))  # type: ignore[arg-type]
            await settled(lambda: bool(kept))
            before.close()
            for each in made:
                await each.join()
            assert made[0].client.service is not None
            machine, voters = made[0].client.service.machine, made[0].client.service.voters
            assert len(machine.members) == JOB.max_nodes
            assert (machine.phase, voters.older) == (Phase.GATHERING, None)
            arrives.set()
            await settled(lambda: voters.older is not None)
            assert (voters.older, machine.generation, machine.budget.used) == (older, 0, 2)
        finally:
            arrives.set()
            for each in made:
                await each.client.close()
            witness.close()


async def test_a_witness_votes_for_many_jobs_and_knows_their_coordinators() -> None:
    place = claim(Endpoint(host="127.0.0.1", port=0))
    said: list[str] = []
    witness = Witness(place, None, PATIENT, "w", said.append)
    await witness.start()
    own = [free_endpoint(), place.endpoint]
    a = Agent("a", own)
    try:
        await a.join()
        await settled(lambda: a.client.service is not None and bool(a.client.service.voters._witnesses))
        other = JobSpec(run_id="other", min_nodes=1, max_nodes=2, backend="c10d")
        names = set()
        for job in (JOB, other):
            connection = await dial_agent(place.endpoint, job, a.node)
            assert connection.accepted.witness
            names.add(connection.accepted.name)
            polled: list[FromCoordinator] = []
            connection.start(polled.append, lambda _: None)
            connection.send(Poll(4, a.seat, CharterPosition(0, 0), final=True))
            await settled(lambda polled=polled: bool(polled))
            assert isinstance(polled[0], Polled)
            connection.abort()
        assert len(names) == 2, "one job's votes count in another one"
        assert said == ["witness of job 'j'", "witness of job 'other'"]
    finally:
        await a.client.close()
        witness.close()


async def test_a_witness_of_too_many_jobs_forgets_the_idle_ones_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.runtime.witness_service.JOBS_MAX", 2)
    place = claim(Endpoint(host="127.0.0.1", port=0))
    said: list[str] = []
    witness = Witness(place, None, PATIENT, "w", said.append)
    await witness.start()
    node = NodeSpec(member="a#1", host="a", nproc=1)
    connected = await dial_agent(place.endpoint, JOB, node)
    connected.start(lambda _: None, lambda _: None)
    try:
        for number in range(5):
            other = JobSpec(run_id=f"other{number}", min_nodes=1, max_nodes=2, backend="c10d")
            (await dial_agent(place.endpoint, other, node)).abort()
            await settled(lambda: not any(job.links for name, job in witness._jobs.items() if name != "j"))
            assert len(witness._jobs) <= 2
        again = await dial_agent(place.endpoint, JOB, node)
        again.abort()
        assert again.accepted.name == connected.accepted.name, "a job that is connected is kept"
        assert len(said) == 6
    finally:
        connected.abort()
        witness.close()

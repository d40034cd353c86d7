"""Answers commands on a running job: by the coordinator, or by the node's agent where the coordinator is unreachable.

A command asks the agent on its host (runtime/control.py). `ControlRequests` passes the question to the coordinator,
where `Answers` answers it. Without an answer in time, `OwnNode` answers for this node alone. Both answer in the same
way from their machine's state; stacks are collected first. Only the machines decide about the end of the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec
from msgspec import Struct

from holdfast.agent.agent_machine import AgentMachine
from holdfast.agent.events import Event, Received
from holdfast.coordinator.coordinator_machine import CoordinatorMachine
from holdfast.coordinator.coordinator_state import HostAsked, QuitAsked
from holdfast.protocol.messages import (
    OF_A_HOST,
    Answer,
    Ask,
    Assign,
    FromAgent,
    FromCoordinator,
    Look,
    Looked,
    Question,
    Quit,
)
from holdfast.protocol.policy import JobSpec, NodeSpec
from holdfast.protocol.rank_progress import (
    Frame,
    JobView,
    NodeView,
    RankProgress,
    RankSample,
    RankStack,
    RankView,
    StacksView,
)
from holdfast.runtime.running import Reply

ANSWER_S_MAX = {**dict.fromkeys(Question, 3.0), Question.STACKS: 8.0}
"""How long an agent waits for the coordinator; stacks are collected on all nodes first."""
LOOK_S_MAX = 5.0
"""Nodes that have not answered by then are listed as missing."""
ANSWER_BYTES_MAX = 3 * 1024 * 1024
"""Leaves room in a frame."""
FRAMES_CUTS = (16, 4, 1)
FIRST_LOOK = 1 << 40
"""The machine numbers its own looks from 1."""

# --- shared by both ---------------------------------------------------------------------------------------------------


class JobSource(Protocol):
    """A job from the view of its coordinator, or of one of its nodes."""

    def view(self) -> JobView: ...

    def quit(self, *, drain: bool, by: str) -> int:
        """Pass the request to the machine. Returns how many nodes it reaches."""

    def host(self, ask: Ask, /) -> tuple[int, str]:
        """The same for a question about one host. Also returns why nothing was done; empty: it was."""


def answer_at_once(source: JobSource, ask: Ask) -> bytes:
    """Answer any question except STACKS."""
    if ask.question is Question.STATUS:
        return status_body(source.view())
    if ask.question in OF_A_HOST:
        nodes, refused = source.host(ask)
        return msgspec.json.encode({"nodes": nodes, "refused": refused})
    return msgspec.json.encode({"nodes": source.quit(drain=ask.question is Question.STOP, by=ask.by)})


def stacks_view(
    run_id: str, generation: int, world_size: int, seen: list[tuple[str, int, RankSample]], silent: tuple[str, ...] = ()
) -> StacksView:
    """`seen`: host, rank and sample of each worker."""
    numbers: dict[tuple[Frame, ...], int] = {}
    ranks = []
    for host, rank, sample in sorted(seen, key=lambda each: each[1]):
        stack = numbers.setdefault(sample.frames, len(numbers)) if sample.frames else -1
        ranks.append(
            RankStack(
                rank=rank,
                host=host,
                local_rank=sample.local_rank,
                pid=sample.pid,
                state=sample.state,
                cpu_s=sample.cpu_s,
                stack=stack,
                note=sample.note,
                file=sample.file,
                source=sample.source,
                threads=sample.threads,
            )
        )
    return StacksView(
        run_id=run_id,
        generation=generation,
        world_size=world_size,
        ranks=tuple(ranks),
        stacks=tuple(numbers),
        silent=silent,
    )


def status_body(view: JobView) -> bytes:
    """Encode a view; without its ranks when the job is so large that they do not fit into a frame."""
    body = msgspec.json.encode(view)
    if len(body) > ANSWER_BYTES_MAX:
        nodes = tuple(msgspec.structs.replace(node, ranks=()) for node in view.nodes)
        body = msgspec.json.encode(msgspec.structs.replace(view, nodes=nodes))
    return body


def stacks_body(view: StacksView) -> bytes:
    """Encode a view; where it does not fit into a frame, other threads are omitted, then outer frames, and then the
    last ranks."""
    body = msgspec.json.encode(view)
    if len(body) > ANSWER_BYTES_MAX:
        ranks = tuple(msgspec.structs.replace(rank, threads=()) for rank in view.ranks)
        view = msgspec.structs.replace(view, ranks=ranks)
        body = msgspec.json.encode(view)
    for frames in FRAMES_CUTS:
        if len(body) <= ANSWER_BYTES_MAX:
            return body
        view = msgspec.structs.replace(view, stacks=tuple(stack[:frames] for stack in view.stacks))
        body = msgspec.json.encode(view)
    while len(body) > ANSWER_BYTES_MAX and view.ranks:
        ranks = view.ranks[: len(view.ranks) // 2]
        used = 1 + max((rank.stack for rank in ranks), default=-1)  # they are numbered in the order of the ranks
        view = msgspec.structs.replace(view, ranks=ranks, stacks=view.stacks[:used])
        body = msgspec.json.encode(view)
    return body


# --- the coordinator --------------------------------------------------------------------------------------------------


class MemberLink(Protocol):
    def send(self, message: FromCoordinator) -> None: ...


class _JobLook(Struct):
    """One collection of samples from all nodes that is in progress."""

    link: int
    ask: Ask
    generation: int
    world_size: int
    awaited: dict[int, tuple[str, int, tuple[int, ...]]]
    """By link: the host, the rank of its first worker, and its local ranks."""
    timer: asyncio.TimerHandle
    seen: list[tuple[str, int, RankSample]] = msgspec.field(default_factory=list)


class Answers:
    """Answers questions on the coordinator's side. `feed` hands an event to its machine."""

    def __init__(
        self,
        machine: CoordinatorMachine,
        links: Mapping[int, MemberLink],
        feed: Callable[[QuitAsked | HostAsked], None],
        fault: Callable[[str, Exception], None],
    ) -> None:
        """`fault`: gets the error of a failed answer; the job continues, and the asking agent gets an empty answer."""
        self._machine = machine
        self._links = links
        self._feed = feed
        self._fault = fault
        self._loop = asyncio.get_running_loop()
        self._number = FIRST_LOOK
        self._looks: dict[int, _JobLook] = {}

    def asked(self, link: int, ask: Ask) -> None:
        """Answer a member. Only a member may read the job's state or end the job: any other link gets an empty
        answer."""
        if not self._machine.is_member(link):
            self._tell(link, ask, lambda: b"")
        elif ask.question is Question.STACKS:
            self._look(link, ask)
        else:
            self._tell(link, ask, lambda: answer_at_once(self, ask))

    def view(self) -> JobView:
        return self._machine.view(self._loop.time())

    def quit(self, *, drain: bool, by: str) -> int:
        # Later: the answer is sent before the machine ends the links. A fault of the machine is not the answer's.
        self._loop.call_soon(self._feed, QuitAsked(drain=drain, by=by))
        return len(self._machine.members)

    def host(self, ask: Ask, /) -> tuple[int, str]:
        there = [member for member in self._machine.members.values() if member.node.host == ask.host]
        if ask.question is not Question.READMIT:
            if not there:
                return 0, f"no node of this job is on {ask.host}"
            if any(member.node.hosts_coordinator for member in there):
                return 0, f"{ask.host} has the job's coordinator: only `holdfast stop` ends it"
        self._loop.call_soon(self._feed, HostAsked(ask.question, ask.host, ask.by, ask.for_s))
        return len(there), ""

    def looked(self, link: int, message: Looked) -> bool:
        """Take a node's samples. False: they answer a look of the machine, not one of ours."""
        if message.number < FIRST_LOOK:
            return False
        look = self._looks.get(message.number)
        if look is not None and link in look.awaited:
            host, base, places = look.awaited.pop(link)
            ranks = {local_rank: base + place for place, local_rank in enumerate(places)}
            look.seen += [(host, ranks[each.local_rank], each) for each in message.samples if each.local_rank in ranks]
            self._finish_if_complete(message.number)
        return True

    def link_closed(self, link: int) -> None:
        for number, look in list(self._looks.items()):
            if look.awaited.pop(link, None) is not None:
                self._finish_if_complete(number)

    def close(self) -> None:
        for look in self._looks.values():
            look.timer.cancel()
        self._looks.clear()

    def _look(self, link: int, ask: Ask) -> None:
        self._number += 1
        number, machine = self._number, self._machine
        world, awaited, base = machine.world, {}, 0
        for name in world.order if world is not None else ():
            assert world is not None
            member = machine.members.get(name)
            if member is not None and member.link in self._links and member.busy_generation:
                awaited[member.link] = (member.node.host, base, world.places[name])
            base += len(world.places[name])
        timer = self._loop.call_later(LOOK_S_MAX, self._finish, number)
        self._looks[number] = _JobLook(link, ask, machine.generation, base, awaited, timer)
        for to in list(awaited):
            self._links[to].send(Look(machine.generation, number))
        self._finish_if_complete(number)

    def _finish_if_complete(self, number: int) -> None:
        if not self._looks[number].awaited:
            self._finish(number)

    def _finish(self, number: int) -> None:
        look = self._looks.pop(number)
        look.timer.cancel()
        silent = tuple(host for host, _, _ in look.awaited.values())
        run_id = self._machine.job.run_id
        self._tell(
            look.link,
            look.ask,
            lambda: stacks_body(stacks_view(run_id, look.generation, look.world_size, look.seen, silent)),
        )

    def _tell(self, link: int, ask: Ask, make: Callable[[], bytes]) -> None:
        if link not in self._links:
            return
        try:
            body = make()
        except Exception as error:  # noqa: BLE001 - a display ends no job
            self._fault(ask.question.value, error)
            body = b""
        self._links[link].send(Answer(ask.number, body))


# --- one node ---------------------------------------------------------------------------------------------------------


class OwnNode:
    """Answers questions for one node. `feed` hands an event to the agent's machine; `progress` and `look` read its
    workers."""

    def __init__(
        self,
        machine: AgentMachine,
        job: JobSpec,
        node: NodeSpec,
        feed: Callable[[Event], None],
        progress: Callable[[], tuple[RankProgress, ...]],
        look: Callable[[], Awaitable[tuple[RankSample, ...]]],
    ) -> None:
        self._machine = machine
        self._job = job
        self._node = node
        self._feed = feed
        self._progress = progress
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()

    def view(self) -> JobView:
        machine, current = self._machine, self._machine.current
        place = current.assign if current is not None else None
        ranks = self._ranks(place) if place is not None else ()
        own = NodeView(
            member=machine.identity,
            host=self._node.host,
            group_rank=place.group_rank if place is not None else None,
            state=machine.work.value,
            heard_s=0.0,
            ranks=ranks,
        )
        return JobView(
            run_id=self._job.run_id,
            phase=machine.work.value,
            generation=current.generation if current is not None else 0,
            restarts=place.restart_count if place is not None else 0,
            restarts_max=self._job.max_restarts,
            world_size=place.world_size if place is not None else 0,
            since_s=0.0,
            job_s=self._loop.time() - self._began_s,
            training_s=0.0,
            nodes=(own,),
            notices=("the coordinator does not answer: this is what this node knows of itself",),
        )

    async def stacks(self) -> bytes:
        current = self._machine.current
        place = current.assign if current is not None else None
        seen = []
        if place is not None:
            samples = [each for each in await self._look() if takes_part(place, each.local_rank)]
            seen = [(self._node.host, rank_in(place, each.local_rank), each) for each in samples]
        generation = current.generation if current is not None else 0
        return stacks_body(stacks_view(self._job.run_id, generation, place.world_size if place else 0, seen))

    def quit(self, *, drain: bool, by: str) -> int:
        # Later: a fault of the machine is not the answer's.
        self._loop.call_soon(self._feed, Received(Quit(drain=drain, by=by)))
        return 1

    def host(self, _ask: Ask, /) -> tuple[int, str]:
        return 0, "the coordinator does not answer"

    def _ranks(self, place: Assign) -> tuple[RankView, ...]:
        return tuple(
            RankView(
                rank=rank_in(place, each.local_rank),
                local_rank=each.local_rank,
                stage=each.stage,
                steps=each.steps,
                step_s=0.0,
                own_s=0.0,
                age_s=each.age_s,
            )
            for each in self._progress()
            if takes_part(place, each.local_rank)
        )


def takes_part(place: Assign, local_rank: int) -> bool:
    """Whether this worker has a place in a node's generation. What was read before a regroup may be of another one."""
    return place.local_ranks is None or local_rank in place.local_ranks


def rank_in(place: Assign, local_rank: int) -> int:
    return place.rank_base + place.place(local_rank)


class ControlRequests:
    """Answers commands on one agent. `send` puts a message on the link to the coordinator; False when there is none."""

    def __init__(self, send: Callable[[FromAgent], bool], own: OwnNode, host: str) -> None:
        self._send = send
        self._own = own
        self._host = host
        self._number = 0
        self._open: dict[int, asyncio.Future[bytes]] = {}

    async def ask(self, ask: Ask) -> Reply:
        """`ask`: its number is not used. `by` empty: the command of the question's name asks."""
        by = f"{ask.by or f'holdfast {ask.question.value}'} on {self._host}"
        self._number += 1
        ask = msgspec.structs.replace(ask, number=self._number, by=by)
        body = await self._ask_coordinator(ask)
        if body is not None:
            return Reply(body=msgspec.Raw(body))
        body = await self._own.stacks() if ask.question is Question.STACKS else answer_at_once(self._own, ask)
        return Reply(whole=False, body=msgspec.Raw(body))

    def answered(self, answer: Answer) -> None:
        waiting = self._open.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.body)

    def link_lost(self) -> None:
        """Open questions get no answer from the coordinator."""
        for waiting in self._open.values():
            waiting.cancel()

    async def _ask_coordinator(self, ask: Ask) -> bytes | None:
        """The coordinator's answer; None: it is unreachable, does not answer in time, or has no answer."""
        waiting = self._open[ask.number] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(ask):
                return None
            await asyncio.wait({waiting}, timeout=ANSWER_S_MAX[ask.question])
            return (waiting.result() or None) if waiting.done() and not waiting.cancelled() else None
        finally:
            del self._open[ask.number]

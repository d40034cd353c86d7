"""Answers commands on a running job: by the coordinator, or by the node's agent where the coordinator is unreachable.

A command asks the agent on its host (runtime/control.py). `ControlRequests` passes the question to the coordinator,
where `Answers` answers it. Without an answer in time, `OwnNode` answers for this node alone. Both answer in the same
way from their machine's state; stacks are collected first. Only the machines decide about the end of the job.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec
from msgspec import Struct

from holdfast.agent.agent_machine import AgentMachine
from holdfast.agent.events import Event, Received
from holdfast.coordinator.coordinator_machine import Coordinator
from holdfast.coordinator.coordinator_state import HostAsked, QuitAsked, SaveAgreed, SaveAsked
from holdfast.protocol.messages import (
    Answer,
    Ask,
    Assign,
    FromAgent,
    FromCoordinator,
    Look,
    Looked,
    Profile,
    Profiled,
    Quit,
)
from holdfast.protocol.policy import JobSpec, NodeSpec
from holdfast.protocol.questions import (
    OF_A_HOST,
    PROFILE_S_MAX,
    ProfiledRank,
    ProfileView,
    Question,
    stacks_body,
    stacks_view,
    status_body,
)
from holdfast.protocol.rank_progress import (
    JobView,
    NodeView,
    RankProgress,
    RankSample,
    RankView,
)
from holdfast.runtime.running import Reply
from holdfast.text import plural, spans

ANSWER_S_MAX = {
    **dict.fromkeys(Question, 3.0),
    Question.STACKS: 8.0,
    Question.SAVE: 8.0,
    Question.PROFILE: PROFILE_S_MAX + 45.0,
}
"""How long an agent waits for the coordinator, which asks all nodes first for some answers."""
LOOK_S_MAX = 5.0
"""Nodes that have not answered by then are listed as missing."""
COLLECT_S_MAX = PROFILE_S_MAX + 40.0
"""The same for a profile."""
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
    """Answer any question except those that are collected from nodes."""
    if ask.question is Question.STATUS:
        return status_body(source.view())
    if ask.question in OF_A_HOST:
        nodes, refused = source.host(ask)
        return msgspec.json.encode({"nodes": nodes, "refused": refused})
    return msgspec.json.encode({"nodes": source.quit(drain=ask.question is Question.STOP, by=ask.by)})


# --- the coordinator --------------------------------------------------------------------------------------------------


class MemberLink(Protocol):
    def send(self, message: FromCoordinator) -> None: ...


class _Collection(Struct):
    """One collection of samples or profiles from all nodes that is in progress."""

    link: int
    ask: Ask
    awaited: dict[int, tuple[str, int, tuple[int, ...]]]
    """By link: the host, the rank of its first worker, and its local ranks."""
    timer: asyncio.TimerHandle
    body: Callable[[_Collection, tuple[str, ...]], bytes]
    """Makes the answer, with the hosts that have sent nothing."""
    seen: list[tuple[str, int, RankSample]] = msgspec.field(default_factory=list)
    profiled: list[ProfiledRank] = msgspec.field(default_factory=list)


class Answers:
    """Answers questions on the coordinator's side. `feed` hands an event to its machine."""

    def __init__(
        self,
        machine: Coordinator,
        links: Mapping[int, MemberLink],
        feed: Callable[[QuitAsked | HostAsked | SaveAsked], None],
        fault: Callable[[str, Exception], None],
        write: Callable[..., None],
    ) -> None:
        """`fault`: gets the error of a failed answer; the job continues, and the asking agent gets an empty answer.
        `write` gets the journal's event of what a user has asked for and the machine does not do."""
        self._machine = machine
        self._links = links
        self._feed = feed
        self._fault = fault
        self._loop = asyncio.get_running_loop()
        self._number = FIRST_LOOK
        self._write = write
        self._looks: dict[int, _Collection] = {}
        self._saves: list[tuple[int, Ask]] = []
        """Who waits for SaveAgreed: the link and its question."""
        self._save_timer: asyncio.TimerHandle | None = None

    def asked(self, link: int, ask: Ask) -> None:
        """Answer a member. Only a member may read the job's state or end the job: any other link gets an empty
        answer."""
        if not self._machine.is_member(link):
            self._tell(link, ask, lambda: b"")
        elif ask.question is Question.STACKS:
            self._write("coordinator.stacks_asked", by=ask.by)
            self._look(link, ask)
        elif ask.question is Question.PROFILE:
            self._profile(link, ask)
        elif ask.question is Question.SAVE:
            self._saves.append((link, ask))
            if len(self._saves) == 1:
                self._loop.call_soon(self._feed, SaveAsked(ask.by))
                late = SaveAgreed(0, f"no safe point was agreed within {LOOK_S_MAX:g} s")
                self._save_timer = self._loop.call_later(LOOK_S_MAX, self.save_agreed, late)
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

    def looked(self, link: int, message: Looked | Profiled) -> bool:
        """Take a node's samples or profiles. False: they answer a look of the machine, not one of ours."""
        if message.number < FIRST_LOOK:
            return False
        look = self._looks.get(message.number)
        if look is not None and link in look.awaited:
            host, base, places = look.awaited.pop(link)
            ranks = {local_rank: base + place for place, local_rank in enumerate(places)}
            if isinstance(message, Looked):
                found = [each for each in message.samples if each.local_rank in ranks]
                look.seen += [(host, ranks[each.local_rank], each) for each in found]
            else:
                look.profiled += [
                    ProfiledRank(ranks[each.local_rank], host, each.files, each.operations, each.why, each.note)
                    for each in message.ranks
                    if each.local_rank in ranks
                ]
            self._finish_if_complete(message.number)
        return True

    def save_agreed(self, agreed: SaveAgreed) -> None:
        """The machine has answered SaveAsked, or did not in time."""
        waiting, self._saves = self._saves, []
        if self._save_timer is not None:
            self._save_timer.cancel()
        nodes = len(self._machine.members) if agreed.safe_point else 0
        for link, ask in waiting:
            self._tell(link, ask, lambda: msgspec.json.encode({"nodes": nodes, "refused": agreed.refused}))

    def link_closed(self, link: int) -> None:
        for number, look in list(self._looks.items()):
            if look.awaited.pop(link, None) is not None:
                self._finish_if_complete(number)

    def close(self) -> None:
        for look in self._looks.values():
            look.timer.cancel()
        self._looks.clear()
        if self._save_timer is not None:
            self._save_timer.cancel()

    def _look(self, link: int, ask: Ask) -> None:
        nodes, size = self._nodes()
        run_id, generation = self._machine.job.run_id, self._machine.generation

        def body(look: _Collection, silent: tuple[str, ...]) -> bytes:
            return stacks_body(stacks_view(run_id, generation, size, look.seen, silent))

        self._collect(link, ask, nodes, LOOK_S_MAX, lambda _, number: Look(generation, number), body)

    def _collect(
        self,
        link: int,
        ask: Ask,
        nodes: dict[int, tuple[str, int, tuple[int, ...]]],
        limit_s: float,
        order: Callable[[int, int], FromCoordinator],
        body: Callable[[_Collection, tuple[str, ...]], bytes],
    ) -> None:
        """Send an order to each of these nodes; `order` makes it for a link and the number of the answer, `body` as in
        _Collection."""
        self._number += 1
        number = self._number
        timer = self._loop.call_later(limit_s, self._finish, number)
        self._looks[number] = _Collection(link, ask, dict(nodes), timer, body)
        for to in nodes:
            self._links[to].send(order(to, number))
        self._finish_if_complete(number)

    def _nodes(self) -> tuple[dict[int, tuple[str, int, tuple[int, ...]]], int]:
        """As in _Collection: the nodes that can be asked, and the size of the world."""
        machine, world, found, base = self._machine, self._machine.world, {}, 0
        for name in world.order if world is not None else ():
            assert world is not None
            member = machine.members.get(name)
            if member is not None and member.link in self._links and member.busy_generation:
                found[member.link] = (member.node.host, base, world.places[name])
            base += len(world.places[name])
        return found, base

    def _profile(self, link: int, ask: Ask) -> None:
        nodes, size = self._nodes()
        wanted, generation = set(ask.ranks), self._machine.generation
        places = {to: range(base, base + len(local_ranks)) for to, (_, base, local_ranks) in nodes.items()}
        asked = {to: node for to, node in nodes.items() if wanted.intersection(places[to])}
        missing = wanted.difference(*places.values())
        refused = "" if wanted else "no ranks are named"
        if missing:
            refused = f"no rank {spans(missing)} runs now; there are {plural(size, 'rank')}"
        if refused:
            self._tell(link, ask, lambda: msgspec.json.encode(ProfileView(refused=refused)))
            return
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{self._number + 1 - FIRST_LOOK}"
        about = {"ranks": sorted(wanted), "steps": ask.steps, "for_s": ask.for_s}
        self._write("coordinator.profile_asked", by=ask.by, name=name, **about)

        def order(to: int, number: int) -> Profile:
            _, base, local_ranks = asked[to]
            chosen = tuple(each for place, each in enumerate(local_ranks) if base + place in wanted)
            return Profile(generation, number, name, chosen, ask.steps, ask.for_s)

        def body(look: _Collection, silent: tuple[str, ...]) -> bytes:
            profiled = tuple(sorted(look.profiled, key=lambda each: each.rank))
            return msgspec.json.encode(ProfileView(name=name, ranks=profiled, silent=silent))

        self._collect(link, ask, asked, COLLECT_S_MAX, order, body)

    def _finish_if_complete(self, number: int) -> None:
        if not self._looks[number].awaited:
            self._finish(number)

    def _finish(self, number: int) -> None:
        look = self._looks.pop(number)
        look.timer.cancel()
        silent = tuple(host for host, _, _ in look.awaited.values())
        self._tell(look.link, look.ask, lambda: look.body(look, silent))

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
            notices=("the coordinator does not answer: this is what this node knows",),
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
                steps=each.job_step - 1 if each.job_step else each.steps,
                step_s=0.0,
                own_s=0.0,
                age_s=each.age_s,
                pid=each.pid,
                counts_job=each.job_step > 0,
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
        if ask.question is Question.STACKS:
            body = await self._own.stacks()
        elif ask.question in (Question.PROFILE, Question.SAVE):
            body = msgspec.json.encode({"nodes": 0, "refused": "the coordinator does not answer"})
        else:
            body = answer_at_once(self._own, ask)
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

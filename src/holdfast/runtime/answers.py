"""The coordinator's answers to commands: what it knows of the job, and what all nodes see when they are made to look now.

Knows the machine's memory and the links; decides nothing. The end of the job is the machine's: it gets the wish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import Struct

from holdfast.core.coordinator.machine import CoordinatorMachine
from holdfast.core.coordinator.state import QuitAsked
from holdfast.core.progress import Frame, JobView, RankSample, RankStack, StacksView
from holdfast.core.protocol import Answer, Ask, FromCoordinator, Look, Looked, Question

if TYPE_CHECKING:
    from collections.abc import Mapping

LOOK_S_MAX = 5.0
"""Nodes that have not answered by then are named instead."""
ANSWER_BYTES_MAX = 3 * 1024 * 1024
"""Leaves room in a frame."""
FRAMES_CUTS = (16, 4, 1)
FIRST_LOOK = 1 << 40
"""The machine's own looks are numbered from 1."""


class MemberLink(Protocol):
    def send(self, message: FromCoordinator) -> None: ...


class _JobLook(Struct):
    """One look at all nodes that is under way."""

    link: int
    ask: Ask
    generation: int
    world_size: int
    awaited: dict[int, tuple[str, int]]
    """By link: the host, and the rank of its first worker."""
    timer: asyncio.TimerHandle
    seen: list[tuple[str, int, RankSample]] = msgspec.field(default_factory=list)


class Answers:
    """One per coordinator. `feed` hands an event to its machine."""

    def __init__(
        self,
        machine: CoordinatorMachine,
        links: Mapping[int, MemberLink],
        feed: Callable[[QuitAsked], None],
        fault: Callable[[str, Exception], None],
    ) -> None:
        """`fault`: gets what went wrong with an answer; the job goes on, and whoever asked gets an empty one."""
        self._machine = machine
        self._links = links
        self._feed = feed
        self._fault = fault
        self._loop = asyncio.get_running_loop()
        self._number = FIRST_LOOK
        self._looks: dict[int, _JobLook] = {}

    def asked(self, link: int, ask: Ask) -> None:
        """Only a member learns anything of the job, or may end it: any other link gets an empty answer."""
        if not self._machine.is_member(link):
            self._tell(link, ask, lambda: b"")
            return
        match ask.question:
            case Question.STATUS:
                self._tell(link, ask, lambda: status_body(self._machine.view(self._loop.time())))
            case Question.STACKS:
                self._look(link, ask)
            case Question.STOP | Question.KILL:
                self._tell(link, ask, lambda: msgspec.json.encode({"nodes": len(self._machine.members)}))
                self._feed(QuitAsked(drain=ask.question is Question.STOP, by=ask.by))

    def looked(self, link: int, message: Looked) -> bool:
        """False: it answers a look of the machine's, not one of ours."""
        if message.number < FIRST_LOOK:
            return False
        look = self._looks.get(message.number)
        if look is not None and link in look.awaited:
            host, base = look.awaited.pop(link)
            look.seen += [(host, base + sample.local_rank, sample) for sample in message.samples]
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
                awaited[member.link] = (member.node.host, base)
            base += world.nproc[name]
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
        silent = tuple(host for host, _ in look.awaited.values())
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
        except Exception as error:  # noqa: BLE001 - what is only shown ends no job
            self._fault(ask.question.value, error)
            body = b""
        self._links[link].send(Answer(ask.number, body))


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
    """Of a job so large that its ranks do not fit into a frame, the nodes alone."""
    body = msgspec.json.encode(view)
    if len(body) > ANSWER_BYTES_MAX:
        nodes = tuple(msgspec.structs.replace(node, ranks=()) for node in view.nodes)
        body = msgspec.json.encode(msgspec.structs.replace(view, nodes=nodes))
    return body


def stacks_body(view: StacksView) -> bytes:
    """Where it does not fit into a frame, other threads are left out, then stacks lose their outer ends, and then the last
    ranks are left out."""
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

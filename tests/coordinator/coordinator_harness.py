"""A coordinator, and hands that speak for its agents, and a way into every phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from holdfast.authority.sole import Sole
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.coordinator_commands import Command, Conclude, DropLink, Tell
from holdfast.coordinator.coordinator_events import Event, Heard, LinkOpened
from holdfast.coordinator.ending import Judge
from holdfast.extensions.hangs.messages import Look, Looked
from holdfast.protocol import messages as msg
from holdfast.protocol.codec import encode_extended
from holdfast.protocol.extension import CoordinatorHalf
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import Grow, JobSpec, Limits, NodeSpec, Note, Tick
from holdfast.protocol.rank_progress import Frame, RankProgress, RankSample, Stage
from holdfast.protocol.train_contract import Survive
from tests.support.simulator.nodes import simple_judge
from tests.support.simulator.stalls import SIMULATED

Kind = TypeVar("Kind", bound=msgspec.Struct)
LIMITS = Limits(
    join_s=60.0,
    settle_s=2.0,
    prepare_s=30.0,
    stop_grace_s=5.0,
    stop_slack_s=15.0,
    hang_report_s=60.0,
    look_gap_s=2.0,
)


class CoordinatorHarness:
    """A coordinator, and hands that speak for the agents on links 1, 2, 3 …"""

    def __init__(
        self,
        least: int = 2,
        most: int = 2,
        *,
        run_id: str = "t",
        max_restarts: int = 0,
        fixed_ranks: bool = False,
        grow: Grow = Grow.DRAIN,
        exclude_after: int = 0,
        survive: Survive = Survive.SHRINK,
        min_ranks: int = 1,
        nproc: int = 1,
        judge: Judge = simple_judge,
        limits: Limits = LIMITS,
        extensions: Sequence[CoordinatorHalf] = SIMULATED,
    ) -> None:
        job = JobSpec(
            run_id=run_id,
            min_nodes=least,
            max_nodes=most,
            backend="c10d",
            max_restarts=max_restarts,
            fixed_ranks=fixed_ranks,
            grow=grow,
            exclude_after=exclude_after,
            survive=survive,
            min_ranks=min_ranks,
        )
        self.nproc = nproc
        self.now = 0.0
        sole = Sole(limits, self.now)
        self.machine = Coordinator(job, limits, judge, self.now, sole, extensions=extensions)
        self.told: list[tuple[int, msg.FromCoordinator]] = []
        self.dropped: list[int] = []
        self.concluded = 0
        self.notes: list[Note] = []
        self.answers: list[tuple[int, msg.Answer]] = []
        """The link and the answer."""
        self.commands: list[Command] = []
        """Those of the newest event."""
        self.extended: list[tuple[int, msg.Extended]] = []
        """Messages of extensions but the one for hangs."""
        self.looks: list[tuple[int, Look]] = []
        """The link and the order to sample the workers."""

    def give(self, event: Event) -> None:
        self.commands = self.machine.handle(self.now, event)
        for command in self.commands:
            match command:
                case Tell(link, msg.Answer() as answer):
                    self.answers.append((link, answer))
                case Tell(link, msg.Extended("hangs", body)):
                    self.looks.append((link, msgspec.msgpack.decode(body, type=Look)))
                case Tell(link, msg.Extended() as message):
                    self.extended.append((link, message))
                case Tell(link, message):
                    self.told.append((link, message))
                case DropLink(link):
                    self.dropped.append(link)
                case Note():
                    self.notes.append(command)
                case Conclude():
                    self.concluded += 1
        self.machine.check_invariants()

    def say(self, link: int, message: msg.FromAgent) -> None:
        self.give(Heard(link, message))

    def ask(self, question: str, link: int = 1, *, number: int = 1, by: str = "somebody", **about: object) -> None:
        """A user on the node of this link asks."""
        self.say(link, msg.Ask(number, question, by, msgspec.json.encode(about)))

    def answer(self, link: int = 1) -> Any:
        """The only answer to this link so far, which is forgotten."""
        (found,) = [answer for to, answer in self.answers if to == link]
        self.answers = [each for each in self.answers if each[0] != link]
        assert not found.refused, found.refused
        return msgspec.json.decode(found.body)

    def refusal(self, link: int = 1) -> str:
        """Why the only question of this link was refused."""
        (found,) = [answer for to, answer in self.answers if to == link]
        self.answers = [each for each in self.answers if each[0] != link]
        assert not found.body
        return found.refused

    def extend(self, link: int, extension: str, message: msgspec.Struct) -> None:
        """The half of an extension on this node sends a message."""
        self.say(link, msg.Extended(extension, encode_extended(message)))

    def ordered(self, link: int, kind: type[Kind]) -> Kind:
        """The only message of an extension to its half on this node, which is forgotten."""
        (found,) = [each for to, each in self.extended if to == link]
        self.extended = [each for each in self.extended if each[0] != link]
        return msgspec.msgpack.decode(found.body, type=kind)

    def looks_at(self, link: int) -> list[Look]:
        """The orders to this node to sample its workers."""
        return [look for to, look in self.looks if to == link]

    def looked(self, link: int, *functions: str, number: int = 0) -> None:
        """This node answers the newest of these orders, or the one with this number: its workers are in these
        functions."""
        samples = tuple(
            RankSample(local_rank, 100 + link, "S", 0.0, (Frame("t.py", 1, function),), file=f"/run/{link}.txt")
            for local_rank, function in enumerate(functions)
        )
        self.extend(link, "hangs", Looked(self.machine.generation, number or self.looks_at(link)[-1].number, samples))

    def both_say(self, message: msg.FromAgent) -> None:
        """The agents on links 1 and 2."""
        for link in (1, 2):
            self.say(link, message)

    def join(
        self,
        *links: int,
        last_generation: int = 0,
        address: str = "10.0.0.",
        versions: dict[str, str] | None = None,
        again: bool = False,
    ) -> None:
        """`again`: these agents have asked to join before."""
        for link in links:
            self.give(LinkOpened(link, f"{address}{link}", "10.0.0.9"))
            member = f"n{link}#1.1" if again else f"n{link}#1"
            node = NodeSpec(member=member, host=f"n{link}", nproc=self.nproc, versions=versions or {})
            self.say(link, msg.Join(node, last_generation))

    def join_running(self, *links: int, generation: int = 7, of: int = 2, restart_count: int = 0) -> None:
        """They come from another coordinator, link n with group rank n-1."""
        for link in links:
            self.give(LinkOpened(link, f"10.0.0.{link}", "10.0.0.9"))
            node = NodeSpec(member=f"n{link}#1", host=f"n{link}", nproc=1)
            self.say(link, msg.Join(node, generation, 0.5, msg.Running(generation, link - 1, of, restart_count)))

    def prepare(self, *links: int) -> None:
        for link in links:
            self.say(link, msg.Prepared(self.machine.generation, 40_000 if link == 1 else None))

    def wait(self, seconds: float) -> None:
        """Time passes; everybody who is a member pings, and Ticks come when they are due."""
        until = self.now + seconds
        while (due := self.machine.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            for link in [member.link for member in self.machine.members.values()]:
                self.say(link, msg.Ping(1))
            self.give(Tick())
        self.now = until

    def noted(self, event: str) -> list[dict[str, object]]:
        """What the journal was told of such events."""
        return [note.fields for note in self.notes if note.event == event]

    def told_to(self, link: int) -> list[msg.FromCoordinator]:
        return [message for to, message in self.told if to == link and not isinstance(message, msg.Pong)]

    def last(self, link: int) -> msg.FromCoordinator:
        return self.told_to(link)[-1]

    def notices(self, link: int) -> list[str]:
        """The lines for the console of this node."""
        return [message.text for message in self.told_to(link) if isinstance(message, msg.Notice)]

    @property
    def links(self) -> set[int]:
        """Those of the members."""
        return {member.link for member in self.machine.members.values()}

    def can_go_on(self, *links: int) -> None:
        """All workers of these nodes that take part are able to go on after a loss."""
        world = self.machine.world
        assert world is not None
        for link in links:
            self.say(link, msg.CanGoOn(world.generation, world.places[f"n{link}#1"]))

    def kill_worker(self, link: int, local_rank: int = 0, *, exit_code: int = -9, read: bool = False) -> None:
        """A worker ends by a signal. `read`: this is its evidence."""
        world = self.machine.world
        assert world is not None
        place = world.places[f"n{link}#1"].index(local_rank)
        rank = world.ranks_of(f"n{link}#1")[place]
        failure = Failure(rank=rank, local_rank=local_rank, host=f"n{link}", pid=100 + rank, exit_code=exit_code)
        self.say(link, msg.WorkersFailed(world.generation, (failure,), evidence_follows=not read))

    def fail(self, link: int, exit_code: int = 1) -> None:
        failure = Failure(rank=link - 1, local_rank=0, host=f"n{link}", pid=1, exit_code=exit_code)
        self.say(link, msg.WorkersFailed(self.machine.generation, (failure,)))


def regrouping(**options: Any) -> CoordinatorHarness:
    """Both ranks could go on after a loss, and rank 1 is lost."""
    harness = running(**{"max_restarts": 2, **options})
    harness.can_go_on(1, 2)
    harness.kill_worker(2)
    return harness


def growing(**options: Any) -> CoordinatorHarness:
    """The replacement of rank 1 is ready."""
    harness = regrouping(**options)
    harness.prepare(1, 2)
    harness.can_go_on(1, 2)
    harness.say(2, msg.ReplacementReady(2, (0,)))
    return harness


def at_safe_point(**options: Any) -> CoordinatorHarness:
    """The workers go to the safe point at which it joins."""
    harness = growing(**options)
    harness.say(1, msg.Held(2, 7))
    return harness


def gathering(**options: Any) -> CoordinatorHarness:
    return CoordinatorHarness(**options)


def preparing(**options: Any) -> CoordinatorHarness:
    harness = CoordinatorHarness(**options)
    harness.join(1, 2)
    return harness


def running(**options: Any) -> CoordinatorHarness:
    harness = preparing(**options)
    harness.prepare(1, 2)
    return harness


def two_of_three(**options: Any) -> CoordinatorHarness:
    harness = CoordinatorHarness(most=3, **options)
    harness.join(1, 2)
    harness.wait(LIMITS.settle_s)
    harness.prepare(1, 2)
    return harness


def steps(
    harness: CoordinatorHarness,
    number: int,
    *,
    own_s: float = 0.0,
    links: tuple[int, ...] = (1, 2),
    generation: int = 0,
) -> None:
    for link in links:
        ranks = (RankProgress(0, Stage.STEPPING, number, 0.0, own_s * number),)
        harness.say(link, msg.Progress(generation or harness.machine.generation, ranks))


def training(**options: Any) -> CoordinatorHarness:
    """Two nodes of one worker each have made 20 steps of 0.1 s, the newest now."""
    harness = running(**options)
    for number in (10, 20):
        harness.wait(1.0)
        steps(harness, number)
    return harness


def draining(**options: Any) -> CoordinatorHarness:
    harness = running(**options)
    harness.say(2, msg.Leave("SIGTERM", drain=True))
    return harness


def stopping(**options: Any) -> CoordinatorHarness:
    harness = running(**options)
    harness.fail(2)
    return harness


def over() -> CoordinatorHarness:
    harness = running()
    harness.both_say(msg.WorkerDone(1, 0))
    return harness

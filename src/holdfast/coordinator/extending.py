"""The extensions of one coordinator: which of them a question or a message is for, which requests are open, and what
becomes of their orders. Knows no extension by name. What they order of the job itself is left to the machine.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import msgspec

from holdfast.coordinator.coordinator_commands import Command, Tell
from holdfast.coordinator.world import Member
from holdfast.protocol import codec
from holdfast.protocol.extension import (
    AnswerRequest,
    CoordinatorExtension,
    CoordinatorHalf,
    DrainBegan,
    DrainEnded,
    Ended,
    Figures,
    Happened,
    Job,
    Observed,
    Order,
    Orders,
    RefuseRequest,
    SafePointAgreed,
    SafePointRefused,
    SaveAtSafePoint,
    Started,
    StartFollows,
    ToCore,
    ToNode,
    UserRequest,
)
from holdfast.protocol.messages import Answer, Ask, Extended
from holdfast.protocol.policy import Note
from holdfast.protocol.rank_progress import JobView

OPEN_MAX = 256
"""Requests that are open at a time. An agent answers 32 clients at a time, so only scripts on many nodes reach this."""
FAULTS_NOTED_MAX = 20
"""Faults of one extension in the journal: one that fails with every report of every node must not fill it."""
FAULT_PAUSE_S = 60.0
"""Time until `due` is called again after it has failed (s): it may stay due, and would be called without a pause."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Open:
    """A request without an answer so far."""

    link: int
    """The link of the agent that asked."""
    number: int
    """The agent's number of the question."""
    extension: str


class Extensions:
    """Every fault of an extension is caught here: it goes to the journal, and the open requests of that extension are
    refused."""

    def __init__(self, registered: Iterable[CoordinatorHalf], job: Job, members: Mapping[str, Member]) -> None:
        self._registered = {each.name: each for each in registered}
        self._extension_of = {question: name for name, each in self._registered.items() for question in each.questions}
        self._job = job
        self._members = members
        self._made: dict[str, CoordinatorExtension] = {}
        self._decoders: dict[str, msgspec.msgpack.Decoder[object]] = {}
        """Decoders of what the halves on the nodes send, by extension; made with the first message."""
        self._faults: Counter[str] = Counter()
        """Number of faults of each extension."""
        self._paused_s: dict[str, float] = {}
        """The time before which `due` is not called, by extension."""
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count(1)
        self._happened: list[tuple[Happened, str]] = []
        """What was not reported yet, and to which extension; to all if that is empty."""
        self._running = 0
        """The generation that runs; 0: none does."""
        self._drains = False
        """That generation drains."""
        self._newest_due_s: float | None = None
        """The result of `due_s`; None: something has changed since."""
        self._saving = ""
        """The extension whose SaveAtSafePoint has not ended yet; empty: none has ordered one."""
        self._out: list[Command | ToCore] = []
        for name, each in self._registered.items():
            if each.follows:
                self._one(name)

    # ---------------------------------------------------------------- what the machine reports

    def runs(self, generation: int, *, drains: bool) -> None:
        """This generation runs now, and may drain; 0: none does."""
        before, self._running = self._running, generation
        drained, self._drains = self._drains, drains
        # A save ends with its generation: nobody would report what has become of it.
        if before and before != generation:
            self._saving = ""
            self.happens(Ended(before))
        if generation and before != generation:
            self.happens(Started(generation))
        elif generation and drained != drains:
            self.happens(DrainBegan(generation) if drains else DrainEnded(generation))

    def start_follows(self, now: float, generation: int) -> list[Command]:
        """Report that the workers of a generation start next. Returns what is sent before."""
        self.happens_now(now, StartFollows(generation))
        first = [order for order in self._out if not isinstance(order, ToCore)]
        self._out = [order for order in self._out if isinstance(order, ToCore)]
        return first

    def happens(self, event: Happened) -> None:
        """Report this when the present event of the machine has been handled to its end."""
        self._happened.append((event, ""))

    def happens_now(self, now: float, event: Happened) -> None:
        """Report this at once."""
        self.happens(event)
        self._report(now)

    def progressed(self, now: float, member: str) -> None:
        """A worker of this node made a step, or reached a new stage."""
        for name in list(self._made):
            self._order(name, lambda extension: extension.progressed(now, member))

    def save_ends(self, event: SafePointAgreed | SafePointRefused) -> None:
        """What has become of SaveAtSafePoint."""
        if self._saving:
            self._happened.append((event, self._saving))
        self._saving = ""

    def link_closed(self, link: int) -> None:
        """Nobody waits for the answers to its questions any more."""
        if self._open:
            self._open = {number: each for number, each in self._open.items() if each.link != link}

    def asked(self, now: float, link: int, ask: Ask) -> None:
        """A user on a member's node has a question."""
        name = self._extension_of.get(ask.question)
        if name is None or len(self._open) >= OPEN_MAX:
            full = f"{OPEN_MAX} questions are being answered; try again"
            why = full if name is not None else f"there is no question {ask.question!r}"
            self._out.append(Tell(link, Answer(ask.number, refused=why)))
            return
        number = next(self._numbers)
        self._open[number] = _Open(link, ask.number, name)
        self._order(name, lambda extension: self._ask(now, extension, number, ask))

    def _ask(self, now: float, extension: CoordinatorExtension, number: int, ask: Ask) -> Orders:
        try:
            about: object = codec.clean(msgspec.json.decode(ask.about, type=extension.questions[ask.question]))
        # What a user sends is refused to that user, and costs the node on which it was asked no link
        # (test_what_it_is_not_asked_about_is_refused_and_costs_no_link).
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return [RefuseRequest(number, f"{ask.question} cannot be asked like this: {error}")]
        return extension.asked(now, UserRequest(number, ask.question, ask.by, about))

    def heard(self, now: float, member: Member, message: Extended) -> None:
        """A node has sent something to an extension; nothing happens if this coordinator does not have that one.

        Raises ProtocolError if it is not what that extension's half on a node sends.
        """
        name = message.extension
        extension = self._one(name) if name in self._registered else None
        if extension is not None and extension.messages is not None:
            if name not in self._decoders:
                self._decoders[name] = msgspec.msgpack.Decoder(extension.messages)
            body = codec.decode(self._decoders[name], message.body, f"an agent's extension {name}")
            self._order(name, lambda extension: extension.heard(now, member.name, body))

    def advance(self, now: float) -> None:
        """Report what has happened, and what is due."""
        self._report(now)
        for name in list(self._made):
            if now >= self._due_s(name):
                before = self._faults[name]
                self._order(name, lambda extension: extension.due(now))
                if self._faults[name] > before:
                    self._paused_s[name] = now + FAULT_PAUSE_S
        self._newest_due_s = None

    def _report(self, now: float) -> None:
        happened, self._happened = self._happened, []
        for event, to in happened:
            for name in [to] if to else list(self._made):
                self._order(name, lambda extension, event=event: extension.happened(now, event))  # type: ignore[misc]

    # ---------------------------------------------------------------- what the machine reads

    def taken(self) -> list[Command | ToCore]:
        """What the extensions have ordered since the last call."""
        out, self._out = self._out, []
        return out

    def due_s(self) -> float:
        """The time at which `advance` must run next; -inf: now."""
        if self._happened or self._out:
            return -inf
        if self._newest_due_s is None:
            self._newest_due_s = min(map(self._due_s, self._made), default=inf)
        return self._newest_due_s

    def observed(self, now: float) -> Observed:
        """What all of them know for the verdict on the running generation."""
        all_ = [self._call(name, lambda extension: extension.observed(now), Observed()) for name in self._made]
        hang = next((each.hang for each in all_ if each.hang is not None), None)
        places = tuple(place for each in all_ for place in each.places)
        devices = tuple(device for each in all_ for device in each.devices)
        return Observed(hang, places, complete=all(each.complete for each in all_), devices=devices)

    def shown_in(self, view: JobView, now: float) -> JobView:
        """The view with the extensions' figures in it."""
        figures = {name: self._call(name, lambda extension: extension.view(now), Figures()) for name in self._made}
        view = _with_places(view, figures.values())
        job = {name: each.job for name, each in figures.items() if each.job is not None}
        of_nodes = {name: each.nodes for name, each in figures.items() if each.nodes is not None}
        if not (job or of_nodes):
            return view
        nodes = [
            msgspec.structs.replace(node, more={name: found.get(node.member) for name, found in of_nodes.items()})
            for node in view.nodes
        ]
        return msgspec.structs.replace(view, more=job, nodes=tuple(nodes))

    # ---------------------------------------------------------------- small steps

    def _one(self, name: str) -> CoordinatorExtension | None:
        """This extension, made if it was not yet; None: it cannot be."""
        if name not in self._made:
            try:
                self._made[name] = self._registered[name].coordinator(self._job)
            except Exception as error:  # noqa: BLE001 - as in _call
                self._fault(name, error)
        return self._made.get(name)

    def _due_s(self, name: str) -> float:
        return max(self._paused_s.get(name, -inf), self._call(name, lambda extension: extension.due_s(), inf))

    def _order(self, name: str, call: Callable[[CoordinatorExtension], Orders]) -> None:
        """Carry out what the extension orders."""
        self._newest_due_s = None
        orders: tuple[Order, ...] = self._call(name, lambda extension: tuple(call(extension)), ())
        for order in orders:
            match order:
                case AnswerRequest(number, body):
                    self._answer(number, body, "")
                case RefuseRequest(number, text):
                    self._answer(number, b"", text)
                case ToNode(member, message) if member in self._members:
                    self._out.append(Tell(self._members[member].link, Extended(name, codec.encode_extended(message))))
                case ToNode():
                    pass  # that node was lost meanwhile
                # A safe point serves one save: its end could not be told from that of another.
                case SaveAtSafePoint() if self._saving:
                    self._happened.append((SafePointRefused("another save is being agreed"), name))
                case SaveAtSafePoint():
                    self._saving = name
                    self._out.append(order)
                case _:
                    self._out.append(order)

    def _answer(self, number: int, body: bytes, refused: str) -> None:
        asked = self._open.pop(number, None)
        if asked is not None:  # else nobody waits for it
            self._out.append(Tell(asked.link, Answer(asked.number, body, refused)))

    def _call(self, name: str, call: Callable[[CoordinatorExtension], Result], without: Result) -> Result:
        """The result; `without` if there is a fault in the extension."""
        extension = self._one(name)
        if extension is None:
            return without
        try:
            return call(extension)
        except Exception as error:  # noqa: BLE001 - an extension may be anybody's: its fault ends no job
            self._fault(name, error)
            return without

    def _fault(self, name: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        self._faults[name] += 1
        if self._faults[name] <= FAULTS_NOTED_MAX:
            last = "; its further faults are not noted" if self._faults[name] == FAULTS_NOTED_MAX else ""
            self._out.append(Note("observer_fault", {"what": name, "error": text + last}))
        for number in [number for number, each in self._open.items() if each.extension == name]:
            self._answer(number, b"", f"a fault in holdfast's extension {name}: {text}")


def _with_places(view: JobView, figures: Collection[Figures]) -> JobView:
    """The view with the extensions' notices, and with the places of ranks where no rank makes progress."""
    replace = msgspec.structs.replace
    notices = tuple(text for each in figures for text in each.notices)
    places = {rank: place for each in figures for rank, place in each.places.items()}
    if any(each.stands_still for each in figures):
        view = replace(view, left_s=0.0)
    if places:
        nodes = [
            replace(
                node,
                ranks=tuple(
                    replace(each, standing=place.standing, place=place.words)
                    if (place := places.get(each.rank))
                    else each
                    for each in node.ranks
                ),
            )
            for node in view.nodes
        ]
        view = replace(view, nodes=tuple(nodes))
    return replace(view, notices=notices) if notices else view

"""Questions of users to a simulated job, and the pretend halves of extensions on its nodes.

Each question ends in one answer or one refusal, unless the link on which it was asked is lost first. What the answer says
is the business of the extensions' own tests.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec

from holdfast.extensions.load.messages import NodeLoad
from holdfast.extensions.profile.messages import COLLECTED_S_MAX, Profiles, RankProfile, TakeProfiles
from holdfast.extensions.stacks.messages import Samples, TakeSamples
from holdfast.protocol.codec import encode_extended
from holdfast.protocol.messages import Answer, Ask, Extended
from holdfast.protocol.rank_progress import RankSample
from tests.support.simulator.checkers import BrokenPromiseError

if TYPE_CHECKING:
    from tests.support.simulator.drawn import DrawnAgent
    from tests.support.simulator.network import FakeEnd

ANSWERED_S_MAX = 90.0
"""The slowest extension but `profile` answers after 5 s. The rest is for processes that stand still and cut networks."""
HARMLESS = ("status", "stacks", "profile", "save", "readmit", "weather")
"""They end no job. Nobody has an extension for the weather."""
DISTURBING = ("drain", "exclude", "stop", "kill")
NEVER = 0.2
"""The share of orders that a node does not answer."""


class Asking:
    """The users on one node, and its halves of the extensions."""

    def __init__(self, agent: DrawnAgent) -> None:
        self._agent = agent
        self._number = 0
        self._open: dict[int, FakeEnd] = {}
        """By number: the link on which it was asked."""

    def ask(self, end: FakeEnd, *, harmless: bool) -> None:
        cluster, random = self._agent.cluster, self._agent.cluster.random
        question = random.choice(HARMLESS if harmless else (*HARMLESS, *HARMLESS, *DISTURBING))
        self._number += 1
        number = self._number
        self._open[number] = end
        cluster.log(self._agent.host, f"asks: {question}")
        cluster.asked[question] += 1
        end.send(Ask(number, question, "a user", _about(random, question, cluster.hosts)))
        limit_s = ANSWERED_S_MAX + (COLLECTED_S_MAX if question == "profile" else 0.0)
        cluster.agenda.after(limit_s, lambda: self._check(number, question))

    def report_load(self, end: FakeEnd) -> None:
        percent = self._agent.cluster.random.randint(0, 100)
        end.send(Extended("load", encode_extended(NodeLoad(8, percent, 10, 100, 5, 50, 1, 2))))

    def answered(self, end: FakeEnd, answer: Answer) -> None:
        if self._open.pop(answer.number, None) is not end:
            raise BrokenPromiseError(f"{self._agent.host} gets an answer {answer.number} to no open question")

    def link_lost(self) -> None:
        self._open.clear()

    def extended(self, end: FakeEnd, message: Extended) -> None:
        """An order to the half of an extension on this node."""
        random = self._agent.cluster.random
        match message.extension:
            case "stacks":
                number = msgspec.msgpack.decode(message.body, type=TakeSamples).number
                samples = tuple(RankSample(rank, 1, "S", 0.0) for rank in sorted(self._agent.workers))
                answer: msgspec.Struct = Samples(number, samples)
            case "profile":
                order = msgspec.msgpack.decode(message.body, type=TakeProfiles)
                answer = Profiles(order.number, tuple(RankProfile(rank) for rank in order.local_ranks))
            case _:
                raise BrokenPromiseError(f"{message.extension} orders something of a node")
        if random.random() >= NEVER:
            delay_s = random.choice([0.01, 0.5, 4.9, 30.0])
            reply = Extended(message.extension, encode_extended(answer))
            self._agent.cluster.agenda.after(delay_s, lambda: end.send(reply) if end.open else None)

    def _check(self, number: int, question: str) -> None:
        if self._agent.alive and number in self._open:
            raise BrokenPromiseError(f"{self._agent.host} gets no answer to its question {number}, {question}")


def _about(random: Random, question: str, hosts: list[str]) -> bytes:
    if random.random() < 0.1:
        return random.choice([b"", b"[", b'{"ranks": "all"}', b"\xff"])
    about: dict[str, object] = {}
    if question in ("drain", "exclude", "readmit"):
        about = {"host": random.choice(hosts), "for_s": random.choice([1.0, 20.0])}
    if question == "profile":
        about = {"ranks": [random.randint(0, 5)], "steps": 5}
    return msgspec.json.encode(about)

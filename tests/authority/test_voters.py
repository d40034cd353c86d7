"""The coordinator with a charter: it decides what a majority knows, steps down without one, and continues another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from holdfast.authority import succeeded
from holdfast.authority.voter_events import Deposed, ProveCaller, ProveVoterGone, VoterGone, WitnessOpened
from holdfast.authority.voters import Voters
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.coordinator_commands import Command, Conclude, DropLink, StepDown, Tell
from holdfast.coordinator.coordinator_events import Event, Heard, LinkClosed, LinkOpened
from holdfast.coordinator.world import Phase
from holdfast.protocol import messages as msg
from holdfast.protocol.charter import (
    NO_CHARTER,
    Charter,
    CharterPosition,
    HostRecord,
    LedFrom,
    Polled,
    Renew,
    Renewed,
    Seat,
    Succession,
)
from holdfast.protocol.outcome import Outcome, OutcomeKind
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec, Tick
from tests.coordinator.coordinator_harness import LIMITS
from tests.support.simulator.nodes import simple_judge

WITNESS = Seat("w#1", "w", "10.0.0.9", 7000, witness=True)


def node(link: int) -> NodeSpec:
    return NodeSpec(member=f"n{link}#1", host=f"n{link}", nproc=1)


def seats(*links: int) -> tuple[Seat, ...]:
    return tuple(Seat(f"n{link}#1", f"n{link}", f"10.0.0.{link}", 7000) for link in links)


class VotersHarness:
    """A coordinator on n1, and the agents behind the links 1, 2, 3 …; link 1 is its own agent's."""

    def __init__(
        self,
        succession: Succession | None = None,
        *,
        least: int = 1,
        most: int = 3,
        own: int = 1,
        places: Sequence[tuple[str, int]] = (),
    ) -> None:
        job = JobSpec(run_id="t", min_nodes=least, max_nodes=most, backend="c10d", max_restarts=2)
        self.now = 100.0
        self.own = own
        self.limits: Limits = LIMITS
        self.voters = Voters(LIMITS, self.now, node(own), succession or Succession(), places=places)
        self.machine = Coordinator(job, LIMITS, simple_judge, self.now, self.voters)
        self.told: list[tuple[int, msg.FromCoordinator]] = []
        self.kept: list[Renew] = []  # by the witness
        self.commands: list[Command] = []
        self.gone = {"n1#1"} if succession is not None else set()
        """Agents whose process has ended, as can be proved."""
        self.silent: set[int] = set()
        """Links whose agents acknowledge nothing."""

    def give(self, event: Event) -> None:
        for command in self.machine.handle(self.now, event):
            if isinstance(command, Tell) and command.link == 9 and isinstance(command.message, Renew):
                self.kept.append(command.message)
            match command:
                case Tell(link, Renew(term, probe, charter)) if link not in self.silent:
                    held = charter.position if charter is not None else self.voters.charter.position
                    self.give(Heard(link, Renewed(term, probe, held)))
                case ProveVoterGone(seat) if seat.name in self.gone:
                    self.give(VoterGone(seat.name))
                case Tell(link, message):
                    self.told.append((link, message))
                case _:
                    self.commands.append(command)
        self.machine.check_invariants()

    def join(self, *links: int, last: int = 0, running: msg.Running | None = None, term: int = 0) -> None:
        for link in links:
            local = link == self.own
            self.give(LinkOpened(link, "127.0.0.1" if local else f"10.0.0.{link}", f"10.0.0.{self.own}", local=local))
            about = last, 0.0, running, "", True, 7000, term
            self.give(Heard(link, msg.Join(node(link), *about)))

    def prepare(self, *links: int) -> None:
        for link in links:
            world = self.machine.world
            assert world is not None
            first = world.order[0] == f"n{link}#1"
            self.give(Heard(link, msg.Prepared(world.generation, 40_000 if first else None)))

    def started(self, *links: int) -> VotersHarness:
        self.join(*links)
        self.prepare(*links)
        return self

    def wait(self, seconds: float) -> None:
        """Time passes; every member but the silent ones pings."""
        until = self.now + seconds
        while (due := self.machine.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            for link in [member.link for member in self.machine.members.values() if member.link not in self.silent]:
                self.give(Heard(link, msg.Ping(1)))
            self.give(Tick())
        self.now = until

    def to(self, link: int, kind: type[msg.FromCoordinator]) -> list[msg.FromCoordinator]:
        return [message for to, message in self.told if to == link and isinstance(message, kind)]

    def waits(self) -> str:
        return self.to(1, msg.Waiting)[-1].text  # type: ignore[attr-defined]

    def did(self, kind: type[Command]) -> list[Command]:
        return [command for command in self.commands if isinstance(command, kind)]


def test_the_start_waits_for_a_majority() -> None:
    harness = VotersHarness()
    harness.silent = {2, 3}
    harness.started(1, 2, 3)
    assert harness.machine.phase is Phase.RUNNING
    assert not harness.to(1, msg.Start)
    assert harness.voters.charter.generation == 1
    assert [seat.name for seat in harness.voters.charter.voters] == ["n1#1", "n2#1", "n3#1"]
    harness.silent = {3}
    harness.wait(1.0)
    assert [len(harness.to(link, msg.Start)) for link in (1, 2, 3)] == [1, 1, 1]
    assert harness.voters.charter.before == ()


def test_two_nodes_elect_nobody_and_wait_for_nobody() -> None:
    harness = VotersHarness(most=2)
    harness.silent = {1, 2}
    harness.started(1, 2)
    assert harness.to(2, msg.Start)
    assert not harness.to(2, Renew)
    harness.wait(3 * LIMITS.fence_s)
    assert not harness.did(StepDown)


def test_a_witness_is_a_third_voter() -> None:
    harness = VotersHarness(most=2)
    harness.give(WitnessOpened(50, Seat("w#1", "w", "10.0.0.50", 7000, witness=True)))
    harness.started(1, 2)
    assert [seat.name for seat in harness.voters.charter.voters] == ["n1#1", "n2#1", "w#1"]
    harness.give(LinkClosed(50, "closed"))
    assert [seat.name for seat in harness.voters.charter.voters] == ["n1#1"]


def test_a_lone_coordinator_goes_on_and_its_witness_keeps_the_charter() -> None:
    harness = VotersHarness(most=2)
    harness.give(WitnessOpened(9, WITNESS))
    harness.started(1, 2)
    harness.give(LinkClosed(2, "lost"))
    harness.give(Heard(1, msg.Stopped(1)))
    harness.prepare(1)
    assert (harness.machine.generation, [seat.name for seat in harness.voters.charter.seats]) == (2, ["n1#1"])
    assert [renew.charter for renew in harness.kept if renew.charter][-1] == harness.voters.charter
    harness.silent, harness.kept = {9}, []
    harness.wait(3 * LIMITS.fence_s)
    assert not harness.did(StepDown), "the witness may be lost, too"
    assert len(harness.kept) > 3, "so the witness knows that it lives"


def test_without_a_majority_it_steps_down_after_a_fence() -> None:
    harness = VotersHarness().started(1, 2, 3)
    harness.silent = {2, 3}
    harness.wait(LIMITS.fence_s - 0.2)
    assert not harness.did(StepDown)
    harness.wait(1.0)
    assert harness.did(StepDown)
    assert harness.machine.next_deadline() is None
    assert harness.machine.handle(harness.now, Tick()) == []


def test_it_steps_down_at_once_when_it_has_slept() -> None:
    harness = VotersHarness().started(1, 2, 3)
    harness.now += LIMITS.fence_s
    harness.give(Heard(2, msg.Ping(7)))
    assert harness.did(StepDown)
    assert not harness.to(2, msg.Pong)


def test_what_a_fence_counts_from_carries_the_age_of_its_authority() -> None:
    harness = VotersHarness(least=3)
    harness.join(1, 2, 3)
    harness.silent, harness.now, harness.told = {2, 3, 4}, harness.now + 1.0, []
    harness.prepare(1, 2, 3)
    harness.join(4)
    harness.give(Heard(2, msg.Ping(9)))
    assert [each.age_s for _, each in harness.told if isinstance(each, msg.Start | msg.Joined | msg.Pong)] == [1.0] * 5


def test_a_vote_for_another_coordinator_deposes_it() -> None:
    harness = VotersHarness().started(1, 2, 3)
    harness.give(Heard(3, Renewed(5, 1, CharterPosition(5, 1))))
    assert harness.did(StepDown)


def test_an_agent_that_knows_a_newer_term_deposes_it() -> None:
    harness = VotersHarness().started(1, 2, 3)
    harness.give(LinkOpened(9, "10.0.0.3", "10.0.0.1"))
    harness.give(Heard(9, msg.Join(node(3), 1, term=7)))
    assert harness.did(StepDown) == [StepDown("a node knows of a newer coordinator (term 7)", 7)]


@pytest.mark.parametrize(
    "message",
    [
        msg.Join(node(4), 1, term=7),
        Renewed(7, 1, NO_CHARTER),
        msg.ContestEndpoint(7, "10.0.0.9", 7000, "n9#1", elected=True),
        msg.ReportCharter(Charter(NO_CHARTER, ()), 7, 0.0),
        Polled(7, granted=False, voter="n2#1"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_link_that_has_not_joined_deposes_nobody(message: Any) -> None:
    harness = VotersHarness().started(1, 2, 3)
    harness.give(LinkOpened(9, "10.0.0.9", "10.0.0.1"))
    harness.give(Heard(9, message))
    assert not harness.did(StepDown)
    assert not harness.machine.stepped_down


@pytest.mark.parametrize("formed", [True, False])
def test_of_two_founders_of_the_same_term_the_one_with_the_later_name_goes_on(formed: bool) -> None:
    """Both know the same answer, whichever of them calls."""
    desks = [VotersHarness(own=own) for own in (1, 2)]
    for number, harness in enumerate(desks, 1):
        harness.started(1, 2, 3) if formed else harness.join(number)
    contests = [harness.voters.contest(f"10.0.0.{number}", 7000) for number, harness in enumerate(desks, 1)]
    assert [contest.term for contest in contests] == [1, 1]
    for harness, contest in zip(desks, reversed(contests), strict=True):
        harness.give(LinkOpened(9, contest.address, "10.0.0.8"))
        harness.give(Heard(9, contest))
        for command in harness.did(ProveCaller):
            assert command.contest == contest  # type: ignore[union-attr]
            harness.give(
                Deposed(contest.term, contest.address, contest.port, contest.name, contest.elected, contest.forms)
            )
    assert [harness.machine.stepped_down for harness in desks] == [True, False]
    if formed:
        (answer,) = desks[1].to(9, msg.CoordinatorAt)
        other = VotersHarness(own=1).started(1, 2, 3)
        other.give(Deposed(answer.term, answer.address, answer.port, answer.name, answer.elected))
        assert other.machine.stepped_down


def test_the_end_is_announced_when_a_majority_knows_it() -> None:
    harness = VotersHarness().started(1, 2, 3)
    harness.silent = {2, 3}
    for link in (1, 2, 3):
        harness.give(Heard(link, msg.WorkerDone(1, 0)))
    assert harness.machine.phase is Phase.OVER
    assert not harness.to(1, msg.Finish)
    assert not harness.did(Conclude)
    harness.silent = {3}
    harness.wait(1.0)
    assert [len(harness.to(link, msg.Finish)) for link in (1, 2, 3)] == [1, 1, 1]
    assert harness.did(Conclude)


def test_voters_that_are_proved_dead_are_left_out() -> None:
    harness = VotersHarness().started(1, 2, 3)
    harness.silent = {2, 3}
    harness.give(LinkClosed(2, "closed"))
    harness.give(LinkClosed(3, "closed"))
    assert {command.seat.name for command in harness.did(ProveVoterGone) if isinstance(command, ProveVoterGone)} == {
        "n2#1",
        "n3#1",
    }
    harness.give(VoterGone("n2#1"))
    harness.give(VoterGone("n3#1"))
    harness.give(Heard(1, msg.Stopped(1)))
    harness.prepare(1)
    harness.wait(3 * LIMITS.fence_s)
    assert not harness.did(StepDown)
    assert [seat.name for seat in harness.voters.charter.voters] == ["n1#1"]
    assert len(harness.to(1, msg.Start)) == 2


def test_the_job_uid_goes_on_with_a_successor() -> None:
    harness = VotersHarness(Succession(3, structs.replace(charter_of(), job_uid="n1#1"), closed=True), own=2)
    harness.join(2, 3, last=4)
    harness.prepare(2, 3)
    assert harness.to(2, msg.Start)[0].job_uid == harness.voters.charter.job_uid == "n1#1"


def test_a_founder_that_continues_an_older_charter_may_be_another_job() -> None:
    """The older one may live on the other side of a cut: its snapshot folder is not free."""
    harness = VotersHarness()
    harness.join(1)
    reported(harness, 2)
    harness.wait(25.0)
    harness.prepare(1, 2)
    assert harness.to(1, msg.Start)[0].job_uid == "n1#1"


def test_lost_voters_that_may_live_are_not_left_out() -> None:
    harness = VotersHarness().started(1, 2, 3)
    harness.silent = {2, 3}
    harness.give(LinkClosed(2, "closed"))
    harness.give(LinkClosed(3, "closed"))
    harness.wait(2.5)
    proofs = [command for command in harness.did(ProveVoterGone) if isinstance(command, ProveVoterGone)]
    assert len(proofs) >= 4, "it tries again"
    harness.wait(2.0)
    assert harness.did(StepDown)


def test_a_lost_voter_is_replaced_with_the_consent_of_those_before() -> None:
    harness = VotersHarness(least=2, most=4).started(1, 2, 3, 4)
    harness.give(LinkClosed(4, "closed"))
    assert [seat.name for seat in harness.voters.charter.voters] == ["n1#1", "n2#1", "n3#1"]
    assert harness.voters.charter.before == (), "two of the three others agreed"


def test_the_founder_steps_down_for_the_job_that_lives() -> None:
    harness = VotersHarness()
    harness.join(1)
    harness.give(LinkOpened(9, "10.0.0.2", "10.0.0.1"))
    contest = msg.ContestEndpoint(1, "10.0.0.2", 7000, "n2#1")
    harness.give(Heard(9, contest))
    assert harness.did(ProveCaller) == [ProveCaller(contest)]
    harness.give(Deposed(1, "10.0.0.2", 7000, "n2#1"))
    assert harness.did(StepDown) == [StepDown("the job goes on elsewhere", 1, "10.0.0.2", 7000)]


def reported(harness: VotersHarness, *links: int, patience_s: float = 20.0) -> None:
    """An agent that knows of an older job of the nodes 11, 12 and 13 connects, and then these agents join."""
    older = structs.replace(charter_of(11, 12, 13), led_from=None, position=CharterPosition(3, 9), job_uid="n11#1")
    harness.give(LinkOpened(9, "10.0.0.12", "10.0.0.1"))
    harness.give(Heard(9, msg.ReportCharter(older, 4, 1.0, patience_s)))
    harness.join(*links)


def test_who_has_formed_a_generation_continues_no_other() -> None:
    harness = VotersHarness().started(1, 2, 3)
    reported(harness)
    assert harness.voters.older is None


def test_a_call_of_an_older_term_is_told_where_the_job_is() -> None:
    harness = VotersHarness(Succession(3, charter_of(), closed=True), own=2)
    harness.join(2, 3, last=4)
    harness.prepare(2, 3)
    harness.give(LinkOpened(9, "10.0.0.1", "10.0.0.2"))
    harness.give(Heard(9, msg.ContestEndpoint(1, "10.0.0.1", 7000)))
    assert harness.to(9, msg.CoordinatorAt) == [msg.CoordinatorAt(3, "10.0.0.2", 7000, "n2#1", elected=True)]
    harness.give(Deposed(2, "10.0.0.1", 7000))
    assert not harness.did(StepDown)
    harness.give(Deposed(4, "10.0.0.1", 7000))
    assert harness.did(StepDown)


# ---------------------------------------------------------------- successors


def charter_of(*links: int, generation: int = 4) -> Charter:
    """The charter of three nodes; n1 had the coordinator, and group rank 0."""
    return Charter(
        CharterPosition(1, 9),
        seats(*(links or (1, 2, 3))),
        generation=generation,
        nodes=("n1#1", "n2#1", "n3#1"),
        led_from=LedFrom(node(1), 0, (0,)),
        restarts=1,
        streak=1,
        leader=f"n{(links or (1,))[0]}#1",
    )


def part(link: int, *, can_go_on: bool = False) -> msg.Running:
    return msg.Running(4, link - 1, 3, 1, (), None, (0,) if can_go_on else ())


def test_numbers_and_the_budget_continue() -> None:
    harness = VotersHarness(Succession(2, charter_of(), closed=True), least=2, own=2)
    harness.join(2, 3, last=4)
    assert harness.machine.phase is Phase.PREPARING, "all that are left have come without workers: nobody else has any"
    assert harness.machine.generation == 5
    assert harness.machine.budget.used == 1
    harness.prepare(2, 3)
    assert harness.to(3, msg.Start)
    assert harness.voters.charter.position.term == 2


def test_hosts_on_back_off_are_known_to_the_successor_of_a_successor() -> None:
    hosts = (HostRecord("n9", 2, 0, 0, 4.0, 0.0),)
    harness = VotersHarness(Succession(term=3, charter=structs.replace(charter_of(1, 2, 3), hosts=hosts)), own=2)
    harness.join(2, 3)
    assert harness.voters.charter.position.term == 3
    assert harness.voters.charter.hosts == hosts


def test_a_host_that_a_user_excludes_or_readmits_is_known_to_a_successor() -> None:
    harness = VotersHarness().started(1, 2, 3)
    harness.machine.host_backoff.exclude("n2", harness.now + 60.0)
    harness.give(Heard(1, msg.Leave("it ends", drain=True)))
    assert harness.voters.charter.hosts == (HostRecord("n2", 0, 0, 0, 0.0, 60.0),)
    harness.machine.host_backoff.readmit("n2")
    harness.give(Tick())
    assert harness.voters.charter.hosts == ()


@pytest.mark.parametrize(("job_s", "left_s"), [(1000.0, 600.0), (1500.0, 100.0), (1700.0, 0.0), (900.0, 600.0)])
def test_a_successor_excludes_a_host_for_the_time_that_is_left(job_s: float, left_s: float) -> None:
    hosts = (HostRecord("n9", 0, 0, 1, 0.0, 600.0),)
    charter = structs.replace(charter_of(1, 2, 3), hosts=hosts, hosts_job_s=1000.0)
    harness = VotersHarness(Succession(term=3, charter=charter, job_s=job_s), own=2)
    harness.join(2, 3)
    (record,) = harness.voters.charter.hosts
    assert record.excluded_s == pytest.approx(left_s)
    assert harness.voters.charter.hosts_job_s == pytest.approx(job_s)
    assert harness.machine.host_backoff.excludes("n9", harness.now) == (left_s > 0)


def test_a_node_that_does_not_come_is_given_its_fence() -> None:
    harness = VotersHarness(
        Succession(2, structs.replace(charter_of(), nodes=("n1#1", "n2#1", "n3#1", "n4#1")), closed=True),
        least=2,
        own=2,
        most=4,
    )
    harness.join(2, 3, last=4)
    harness.wait(LIMITS.fence_s)
    assert harness.machine.phase is Phase.GATHERING
    harness.wait(1.0)
    assert harness.machine.phase is Phase.PREPARING


def charter_of_four(address: str = "10.0.0.4") -> Charter:
    """The fourth node has no vote."""
    listeners = tuple((f"10.0.0.{number}", 7000) for number in (1, 2, 3))
    nodes = ("n1#1", "n2#1", "n3#1", "n4#1")
    return structs.replace(charter_of(), nodes=nodes, listeners=(*listeners, (address, 7000)))


def test_an_address_that_means_another_machine_here_proves_nothing() -> None:
    harness = VotersHarness(Succession(2, charter_of_four("127.0.0.1"), closed=True), least=2, own=2, most=4)
    harness.join(2, 3, last=4)
    harness.wait(succeeded.PROVE_FIRST_S)
    assert not [command for command in harness.did(ProveVoterGone) if "n4" in repr(command)]
    harness.give(VoterGone("n4#1"))
    assert harness.machine.phase is Phase.GATHERING


def test_no_fence_for_a_node_that_has_ended() -> None:
    charter = charter_of_four()
    harness = VotersHarness(Succession(2, charter, closed=True), least=2, own=2, most=4)
    harness.join(2, last=4)
    harness.join(3, last=4, running=msg.Running(4, 2, 4, 1))
    harness.wait(succeeded.PROVE_FIRST_S)
    assert ProveVoterGone(Seat("n4#1", "", "10.0.0.4", 7000)) in harness.commands
    harness.gone.add("n4#1")
    harness.wait(LIMITS.prove_s)
    assert harness.to(3, msg.Abandon) == [msg.Abandon(4)]
    harness.give(Heard(3, msg.Stopped(4)))
    assert harness.machine.phase is Phase.PREPARING


def test_who_has_no_vote_is_told_who_has_and_not_the_roster() -> None:
    harness = VotersHarness(least=2, most=4)
    harness.silent = {4}
    harness.started(1, 2, 3, 4)
    told = [renew.charter for renew in harness.to(4, Renew) if renew.charter]  # type: ignore[attr-defined]
    newest = harness.voters.charter
    assert newest.nodes == ("n1#1", "n2#1", "n3#1", "n4#1")
    assert {(charter.seats, charter.nodes, charter.listeners) for charter in told} == {(newest.seats, (), ())}
    assert all(renew.founded for renew in harness.to(4, Renew)), "it may have voted for another one in this term"  # type: ignore[attr-defined]


def test_the_charter_is_made_when_something_has_changed_and_not_for_each_message(monkeypatch) -> None:
    """While the first generation is prepared no voter can be chosen. In a job of 10,000 each one costs milliseconds."""
    made = []
    content = Voters._content
    monkeypatch.setattr(Voters, "_content", lambda *args: made.append(args) or content(*args))
    harness = VotersHarness(least=2, most=12)
    harness.join(*range(1, 13))
    made.clear()
    harness.prepare(*range(1, 12))
    assert made == []
    harness.prepare(12)
    assert harness.machine.phase is Phase.RUNNING
    assert len(made) <= 6


def test_a_node_that_leaves_gives_its_vote_to_another_one() -> None:
    harness = VotersHarness(least=2, most=4).started(1, 2, 3, 4)
    assert [seat.name for seat in harness.voters.charter.voters] == ["n1#1", "n2#1", "n3#1"]
    harness.give(Heard(2, msg.Leave("SIGTERM", drain=True)))
    assert [seat.name for seat in harness.voters.charter.voters] == ["n1#1", "n3#1", "n4#1"]
    harness.give(Heard(3, msg.Leave("SIGTERM", drain=True)))
    assert len(harness.voters.charter.voters) == 3, "two have no majority"
    assert harness.voters.charter.listeners[1] == ("10.0.0.2", 7000)


def test_the_age_of_the_job_continues() -> None:
    harness = VotersHarness(Succession(2, charter_of(), closed=True, job_s=600.0, training_s=500.0), own=2)
    harness.wait(1.0)
    assert harness.machine.view(harness.now).job_s == 601.0
    assert harness.machine.view(harness.now).training_s == 500.0


def test_a_coordinator_that_may_live_is_given_its_fence() -> None:
    """Its connections were closed, and that does not prove that its process has ended."""
    harness = VotersHarness(Succession(2, charter_of(), closed=True), least=2, own=2)
    harness.gone.clear()
    harness.join(2, 3, last=4)
    harness.wait(LIMITS.fence_s)
    assert harness.machine.phase is Phase.GATHERING
    harness.wait(1.0)
    assert harness.machine.phase is Phase.PREPARING


def test_workers_that_can_go_on_survive_the_coordinator() -> None:
    harness = VotersHarness(Succession(2, charter_of(), closed=True), own=2)
    harness.join(2, last=4, running=part(2, can_go_on=True))
    harness.join(3, last=4, running=part(3, can_go_on=True))
    assert harness.to(3, msg.Resume)
    assert harness.to(3, msg.Regroup)
    assert harness.machine.phase is Phase.REGROUPING
    assert harness.machine.generation == 5


def test_workers_that_cannot_go_on_are_stopped_in_order() -> None:
    harness = VotersHarness(Succession(2, charter_of(), closed=True), own=2)
    harness.join(2, last=4, running=part(2))
    harness.join(3, last=4, running=part(3))
    stop = harness.to(3, msg.Stop)[-1]
    assert isinstance(stop, msg.Stop)
    assert stop.reason is msg.StopReason.MEMBER_LOST
    assert not harness.to(3, msg.Abandon)


def test_a_generation_without_the_coordinators_node_continues() -> None:
    charter = structs.replace(charter_of(), led_from=None, nodes=("n2#1", "n3#1"))
    harness = VotersHarness(Succession(2, charter, closed=True), own=2)
    for link in (2, 3):
        harness.join(link, last=4, running=msg.Running(4, link - 2, 2, 1))
    assert harness.to(3, msg.Resume) == [msg.Resume(4)]
    assert harness.machine.phase is Phase.RUNNING


def test_an_outcome_that_was_decided_stays() -> None:
    over = Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0)
    harness = VotersHarness(Succession(2, structs.replace(charter_of(), outcome=over), closed=True), own=2)
    harness.join(2, 3, last=4)
    assert harness.to(3, msg.Finish) == [msg.Finish(over)]


def test_a_successor_whose_voters_do_not_come_steps_down() -> None:
    harness = VotersHarness(Succession(2, charter_of(), closed=True), own=2)
    harness.join(2, last=4)
    harness.wait(LIMITS.fence_s - 0.1)
    assert not harness.to(2, msg.Start)
    assert not harness.did(StepDown)
    harness.wait(0.2)
    assert harness.did(StepDown)
    assert not [command for command in harness.commands if isinstance(command, DropLink)]

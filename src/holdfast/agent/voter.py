"""A voter, one for each agent's process or witness: keeps the charter, gives its votes, stands for election. PURE.

`handle(now, event) -> commands`; no clock, no socket, no randomness. Knows nothing of generations and workers.

    FOLLOWING ◄──► ALONE ──► ASKING ──► STANDING ──► LEADING ──► FOLLOWING

Three rules keep two coordinators from deciding in one term. A voter gives one vote per term, its own included. It votes
for nobody whose charter is older than its own, so the winner knows everything that counts. And once it has given a
vote in a term, it confirms no coordinator of an earlier one, and in this term none that founded the job again: such a
one takes a term without a vote.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from msgspec import Struct, structs

from holdfast.protocol.charter import (
    NO_CHARTER,
    VOTERS_MIN,
    Charter,
    CharterPosition,
    Poll,
    Polled,
    Renew,
    Renewed,
    Seat,
    Succession,
)
from holdfast.protocol.messages import ReportCharter
from holdfast.protocol.policy import Limits, Note, Tick, doubled

PLACE_FACTOR = 3.0
"""A voter that stands again waits this many times `Limits.stand_s` longer than the one placed before it."""


class VoterState(Enum):
    FOLLOWING = "following"
    """Linked to a coordinator."""
    ALONE = "alone"
    """It has no coordinator: it has had none, or has lost it."""
    ASKING = "asking"
    """It asks the others whether they would vote for it. Nothing changes by that."""
    STANDING = "standing"
    """It has voted for itself in a new term, and asks for the others' votes."""
    LEADING = "leading"
    """It was elected. The coordinator is started in this process, and its own agent links to it next."""


TRANSITIONS: dict[tuple[VoterState, VoterState], str] = {
    (VoterState.ALONE, VoterState.FOLLOWING): "Linked; or a Renew of a later term, and to a witness any",
    (VoterState.ASKING, VoterState.FOLLOWING): "the same",
    (VoterState.STANDING, VoterState.FOLLOWING): "the same",
    (VoterState.LEADING, VoterState.FOLLOWING): "the same: by the coordinator in this process",
    (VoterState.FOLLOWING, VoterState.ALONE): "Unlinked, or a witness gets no Renew for a fence",
    (VoterState.ALONE, VoterState.ASKING): "its time to stand has come",
    (VoterState.ASKING, VoterState.STANDING): "a majority would vote for it, itself included",
    (VoterState.ASKING, VoterState.ALONE): "no majority would in time, or it gave its vote to another one",
    (VoterState.STANDING, VoterState.LEADING): "a majority has voted for it; Lead is emitted",
    (VoterState.STANDING, VoterState.ALONE): "no majority has in time, or it voted for another one in a later term",
    (VoterState.LEADING, VoterState.ALONE): "Unlinked: the coordinator in this process has stepped down",
}


class LeaderAddress(Struct, frozen=True):
    """A coordinator's listener."""

    address: str
    port: int
    term: int


class Linked(Struct, frozen=True):
    """Event: the agent has joined a coordinator of this term."""

    term: int


class Unlinked(Struct, frozen=True):
    """Event: the link to the coordinator of this term is lost."""

    term: int
    closed: bool
    """The other side closed it; False: it became silent, or this side closed it."""
    local: bool = False
    """The coordinator was in this process, and has stepped down."""
    aside: bool = False
    """It did so for another voter, which is given time to win."""


class RenewCame(Struct, frozen=True):
    """Event: from the coordinator. Answered with SendRenewed."""

    renew: Renew


class PollCame(Struct, frozen=True):
    """Event: a candidate asks. Answered with AnswerPoll."""

    number: int
    poll: Poll


class PolledCame(Struct, frozen=True):
    """Event: somebody at the seat of this name has answered this Poll."""

    name: str
    poll: Poll
    polled: Polled


class PollFailed(Struct, frozen=True):
    """Event: there is no answer from this seat to this Poll."""

    name: str
    poll: Poll
    gone: bool = False
    """The voter's process has ended: its host answers, and nobody listens there."""


class HeardOf(Struct, frozen=True):
    """Event: another process reports where the coordinator is."""

    term: int
    address: str
    port: int


class FounderMet(Struct, frozen=True):
    """Event: another process starts the job again, while this voter follows a coordinator."""


class Leaves(Struct, frozen=True):
    """Event: the agent ends soon. It votes until then, and does not stand any more."""


class SendRenewed(Struct, frozen=True):
    """Command: to the coordinator whose Renew has just been handled."""

    renewed: Renewed


class AskVote(Struct, frozen=True):
    """Command: connect to this seat and ask. Ends in PolledCame or PollFailed."""

    seat: Seat
    poll: Poll


class AnswerPoll(Struct, frozen=True):
    number: int
    polled: Polled


class Lead(Struct, frozen=True):
    """Command: start the coordinator in this process. Its agent is linked to it then; otherwise Unlinked follows."""

    succession: Succession


Event = Linked | Unlinked | RenewCame | PollCame | PolledCame | PollFailed | HeardOf | FounderMet | Leaves | Tick
Command = SendRenewed | AskVote | AnswerPoll | Lead | Note


class Voter:
    """One voter. `TRANSITIONS` lists every change of `stage`, which `_enter` alone makes."""

    def __init__(self, name: str, limits: Limits, now: float, *, stands: bool) -> None:
        """`name`: of its seat, an identity that is used once. `stands`: it is an agent; False: it is a witness, which
        never becomes the coordinator and has no other way to notice a silent one than the Renews."""
        self.name = name
        self.limits = limits
        self.stands = stands
        self.stage = VoterState.ALONE
        self.term = 0
        """The newest term in which it has a coordinator or has voted."""
        self.charter: Charter | None = None
        """The newest one that a coordinator has sent, or that others have and in which it has a seat; None: there was
        none. Its position only grows."""
        self._newer: Charter | None = None
        """A newer charter in which it has no seat."""
        self._denies: set[str] = set()
        """Voters that hold such a one."""
        self.leader: LeaderAddress | None = None
        """The address of the newest coordinator that it knows; perhaps the one that is lost."""
        self._followed = 0
        """The term of the newest coordinator to which it was linked."""
        self._voted_for = ""
        """Its vote in `term`; empty: none."""
        self._bound_s = now
        """The time at which it last confirmed a coordinator or gave a vote to another candidate."""
        self._closed = False
        """The newest coordinator closed the link."""
        self._lost_s = now
        """The time at which it lost its newest coordinator; else the time at which it began."""
        self._gone: set[str] = set()
        """Voters whose process has ended."""
        self._follow_terms: dict[str, int] = {}
        """The terms of the coordinators to which other voters are linked."""
        self._stand_at_s = now
        """The time before which it does not stand. Means something while it is ALONE."""
        self._failed = 0
        """Elections without a winner since the loss."""
        self._poll: Poll | None = None
        """Its question to the other voters; None: it asks nothing."""
        self._asked_s = now
        """The time at which it asked. Means something while there is a `_poll`."""
        self._answers: dict[str, Polled | None] = {}
        """The answer of each voter; None: there is none."""
        self._leaves = False
        """Its agent ends soon, so it does not stand any more. Never taken back."""
        self._rival = False
        """Another node wants to be the coordinator, as in Renewed."""
        self._job_began_s = now
        """The time at which the job began, by this clock and as far as it knows."""
        self._training_s = 0.0
        self._reported_to = ""
        """The newest founder that knows its charter."""
        self._next_term = 0
        """Others know a term just before this one."""
        self._out: list[Command] = []

    def check_invariants(self) -> None:
        own = self._seat()
        assert (self._poll is not None) == (self.stage in (VoterState.ASKING, VoterState.STANDING))
        if self.stage in (VoterState.ASKING, VoterState.STANDING, VoterState.LEADING):
            assert self.stands
            assert own is not None
            assert not own.witness
        if self.stage in (VoterState.STANDING, VoterState.LEADING):
            assert self._voted_for == self.name, "it stands in a term in which it has not voted for itself"
        if self.stage is VoterState.FOLLOWING:
            assert self._followed == self.term, "it follows a coordinator after it has given a vote in a later term"
        assert self._followed <= self.term

    @property
    def held(self) -> CharterPosition:
        return NO_CHARTER if self.charter is None else self.charter.position

    @property
    def newest(self) -> Charter | None:
        """The charter by which a coordinator may be elected: its own, by which it votes, or one that has taken the
        place of that, and in which it has no seat. Then most voters of its own hold that one, or have ended."""
        own = self.charter
        if own is None or self._newer is None:
            return own
        return own if own.carried_without(self._gone | self._denies) else self._newer

    def elects(self, now: float) -> bool:
        """Whether it has lost a coordinator that its voters may replace: then it does not found the job again."""
        return self._may_elect(now, self._gone)

    def ignores(self, now: float, name: str, term: int, *, founded: bool) -> bool:
        """Whether it should not join the coordinator of this term in the process of this name: one that founded the job
        again, while this one's voters may elect."""
        with_it = {name for name, follows in self._follow_terms.items() if follows == term > self._followed}
        charter = self.newest
        known = charter is not None and any(seat.name == name for seat in charter.seats)
        return founded and not known and self._may_elect(now, self._gone | with_it)

    def charter_report(self, now: float, name: str, term: int, *, founded: bool, forms: bool) -> ReportCharter | None:
        """What to send to the coordinator of this term in the process of this name, before a Join or instead; None:
        nothing. `forms`: that coordinator starts the job again, and may not know the charter that this voter has."""
        charter = self.newest
        if not forms or charter is None or charter.outcome is not None or charter.leader == name:
            return None
        if self.stage is VoterState.FOLLOWING:
            return ReportCharter(charter, self.term, 0.0, self.limits.fence_s + self.limits.kill_s, follows=True)
        left_s = self._lost_s + self.limits.elect_s - now
        patience_s = left_s if self.ignores(now, name, term, founded=founded) else 0.0
        if patience_s and self._seat() is None:  # there may be thousands of them, and each tries again and again
            if self._reported_to == name:
                return None
            self._reported_to = name
        return ReportCharter(charter, self.term, max(0.0, now - self._lost_s), patience_s)

    @property
    def calls(self) -> bool:
        """Whether it calls the endpoint, where a node that returned may start the job again. The coordinator calls it,
        too, but may hear nothing at that moment (succession seed 14819)."""
        seats = self.charter.seats if self.charter is not None else ()
        return self.stage is VoterState.FOLLOWING and any(seat.name == self.name for seat in seats)

    def _may_elect(self, now: float, but: set[str]) -> bool:
        if self.stage in (VoterState.FOLLOWING, VoterState.LEADING) or now >= self._lost_s + self.limits.elect_s:
            return False
        charter = self.newest
        if charter is None or len(charter.seats) < VOTERS_MIN:
            return False
        return charter.carried_without(but)

    # ---------------------------------------------------------------- surface

    def handle(self, now: float, event: Event) -> list[Command]:
        match event:
            case Linked(term):
                self._follow(term)
            case Unlinked(term, closed, local, aside):
                # An agent has one link, and a founder may have taken a later term. A witness may have several links.
                newest = self.stands or term >= self._followed
                leads = self.stage is VoterState.LEADING and term >= self.term
                if leads or (newest and self.stage is VoterState.FOLLOWING):
                    self._lose(now, closed=closed, local=local, aside=aside)
            case RenewCame(renew):
                self._on_renew(now, renew)
            case PollCame(number, poll):
                self._on_poll(now, number, poll)
            case PolledCame(name, poll, polled):
                if polled.voter != name:  # its process has ended, and another one listens there
                    self._gone.add(name)
                self._on_answer(now, name, poll, polled if polled.voter == name else None)
            case PollFailed(name, poll, gone):
                if gone:
                    self._gone.add(name)
                self._on_answer(now, name, poll, None)
            case HeardOf(term, address, port):
                self._on_heard_of(now, LeaderAddress(address, port, term))
            case FounderMet():
                # That process waits as long as this voter follows a coordinator. If the coordinator lacks the nodes
                # that have joined that process, it has to step aside: otherwise both would wait for ever.
                self._rival = self.stage is VoterState.FOLLOWING
            case Leaves():
                self._leaves = True
                # Elected, it would start a coordinator that ends at once
                # (test_an_agent_that_leaves_votes_and_does_not_stand).
                if self._poll is not None:
                    self._fail(now)
            case Tick():
                pass
        self._advance(now)
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> float | None:
        """The time at which the next Tick is due; None: nothing is awaited."""
        match self.stage:
            case VoterState.FOLLOWING:
                return None if self.stands else self._bound_s + self.limits.fence_s
            case VoterState.ALONE:
                return self._stand_at_s if self._may_stand else None
            case VoterState.ASKING | VoterState.STANDING:
                return self._asked_s + self.limits.poll_s
            case VoterState.LEADING:
                return None

    def _advance(self, now: float) -> None:
        match self.stage:
            case VoterState.FOLLOWING if not self.stands and now >= self._bound_s + self.limits.fence_s:
                self._lose(now, closed=False)
            case VoterState.ALONE if now >= self._stand_at_s and self._may_stand:
                self._ask(now, VoterState.ASKING)
        if self.stage is VoterState.ASKING:
            self._count(now)
        if self.stage is VoterState.STANDING:
            self._count(now)

    # ---------------------------------------------------------------- coordinator and charter

    def _follow(self, term: int) -> None:
        """Follow the coordinator of this term. One of an earlier term is ignored: it may not know yet that there is a
        later one."""
        if term < self.term:
            return
        if term > self.term:
            self.term, self._voted_for = term, ""
        self._followed, self._closed, self._failed = term, False, 0
        self._poll = None
        self._enter(VoterState.FOLLOWING)

    def _lose(self, now: float, *, closed: bool, local: bool = False, aside: bool = False) -> None:
        if local:  # it had this vote at any time, without a Renew
            self._bound_s = now
        self._closed = closed and not local
        self._lost_s = now
        self._follow_terms.clear()
        # It stepped aside for another one, which gets time to stand first
        # (test_one_that_stepped_aside_lets_the_others_stand_first).
        self._stand_at_s = now + (self.limits.lease_s if aside else self.limits.stand_s * self._place())
        self._enter(VoterState.ALONE)

    def _on_renew(self, now: float, renew: Renew) -> None:
        # A founder takes its term without a vote: somebody else may have been elected in it by this vote
        # (test_after_a_vote_it_confirms_no_coordinator_of_an_earlier_term_and_no_founder_of_this).
        if renew.term == self.term and self._voted_for and renew.founded:
            return
        # An agent is Linked first. What was still on its way when it lost this coordinator does not bring it back.
        if renew.term > self.term or not self.stands:
            self._follow(renew.term)
        if renew.term == self.term:
            self._bound_s = now
            self._job_began_s = min(self._job_began_s, now - renew.job_s)
            self._training_s = max(self._training_s, renew.training_s)
            if renew.charter is not None and renew.charter.position > self.held:
                self._take(now, renew.charter)
        self._out.append(SendRenewed(Renewed(self.term, renew.probe, self.held, self._rival)))
        self._rival = False

    def _on_heard_of(self, now: float, where: LeaderAddress) -> None:
        if self.leader is not None and where.term < self.leader.term:
            return
        if where.term >= self.term and (self.leader is None or where.term > self.leader.term):
            self._wait_for_winner(now)
        self.leader = where

    def _wait_for_winner(self, now: float) -> None:
        """There may be a new coordinator: give it time before this voter stands itself."""
        self._stand_at_s = max(self._stand_at_s, now + self.limits.poll_s + self._stagger_s())

    # ---------------------------------------------------------------- votes for others

    def _on_poll(self, now: float, number: int, poll: Poll) -> None:
        if poll.charter is not None and self.stage is VoterState.ALONE:
            self._learn(now, poll.charter)
        granted = self._would_vote(poll)
        follows = self.term if self.stage in (VoterState.FOLLOWING, VoterState.LEADING) else 0
        silent_s, closed = max(0.0, now - self._bound_s), self._closed
        # The coordinator learns from the next Renewed that somebody else stands, and steps aside if its own nodes are
        # too few (test_it_steps_aside_for_one_that_stands_for_a_lease).
        self._rival = self._rival or (bool(follows) and poll.held >= self.held)

        if granted and poll.final:
            self._vote(now, poll)
        # A candidate may lack what only this voter, or a witness, has got in time
        # (test_what_only_a_witness_has_reaches_a_candidate).
        newer = poll.held < self.held and not (follows and poll.final)
        charter = self.charter if newer else None
        self._out.append(AnswerPoll(number, Polled(self.term, granted, silent_s, closed, self.name, follows, charter)))

    def _would_vote(self, poll: Poll) -> bool:
        # Else a node that is cut off could depose a coordinator that all others hear
        # (test_a_voter_that_follows_a_coordinator_votes_for_nobody).
        if self.stage in (VoterState.FOLLOWING, VoterState.LEADING) or poll.held < self.held:
            return False
        return poll.term > self.term or (poll.term == self.term and self._voted_for == poll.candidate.name)

    def _vote(self, now: float, poll: Poll) -> None:
        candidate = poll.candidate
        self.term, self._voted_for, self._poll = poll.term, candidate.name, None
        self._bound_s = now
        self._note("votes", term=poll.term, candidate=candidate.name)
        self._enter(VoterState.ALONE)
        self._wait_for_winner(now)
        self._on_heard_of(now, LeaderAddress(candidate.address, candidate.port, poll.term))

    # ---------------------------------------------------------------- standing for election

    def _ask(self, now: float, stage: VoterState) -> None:
        own, charter = self._seat(), self.charter
        assert own is not None
        assert charter is not None
        term = max(self.term + 1, self._next_term)
        final = stage is VoterState.STANDING
        if final:
            self.term, self._voted_for = term, self.name
        self._poll = Poll(term, own, charter.position, final)
        self._asked_s, self._answers = now, {}
        self._enter(stage)
        self._out += [AskVote(seat, self._poll) for seat in charter.seats if seat.name != self.name]

    def _on_answer(self, now: float, name: str, poll: Poll, polled: Polled | None) -> None:
        if polled is not None and not polled.granted:
            self._next_term = max(self._next_term, polled.term + 1)
        self._follow_terms[name] = 0 if polled is None else polled.follows
        if poll == self._poll:
            self._answers[name] = polled

        newer = None if polled is None else polled.charter
        if newer is not None and not self._learn(now, newer) and newer.position > self.held:
            self._denies.add(name)
            if self._newer is None or newer.position > self._newer.position:
                self._newer = newer
            if poll == self._poll:
                # Only those can stand that have taken its place, and they may not know that they have.
                passed_on = structs.replace(poll, final=False, charter=newer)
                self._out += [AskVote(seat, passed_on) for seat in newer.seats if not seat.witness]

    def _learn(self, now: float, charter: Charter) -> bool:
        """Take this charter if it is newer and this voter has a seat in it: others deny their votes to an older one."""
        if charter.position <= self.held or all(seat.name != self.name for seat in charter.seats):
            return False
        self._take(now, charter)
        self._stand_at_s = now
        return True

    def _take(self, now: float, charter: Charter) -> None:
        """Hold this charter from now on. An election that it has begun ends: it is for an older charter, which may be
        the only one in which it has a seat."""
        self.charter, self._newer = charter, None
        self._denies.clear()
        if self._poll is not None:
            self._fail(now)

    def _count(self, now: float) -> None:
        """Whether the votes decide."""
        charter = self.charter
        assert charter is not None
        votes = {name: answer for name, answer in self._answers.items() if answer is not None and answer.granted}
        possible = [seat.name for seat in charter.seats if seat.name in votes or seat.name not in self._answers]
        if self._elected_by([self.name, *votes]):
            if self.stage is VoterState.ASKING:
                self._ask(now, VoterState.STANDING)
            else:
                self._win(now, list(votes.values()))
        elif now >= self._asked_s + self.limits.poll_s or not self._elected_by([self.name, *possible]):
            self._fail(now)

    def _elected_by(self, names: Collection[str]) -> bool:
        """Whether these are a majority of all voters: one that has ended may have been the only one with the newest
        charter, so it counts, too."""
        return self.charter is not None and self.charter.carried_by(names)

    def _win(self, now: float, votes: list[Polled]) -> None:
        own, charter = self._seat(), self.charter
        assert own is not None
        # The lost coordinator's workers live one fence from its newest confirmation on, and each of these may have
        # given that (test_silence_counts_from_what_the_voter_last_confirmed).
        silent_s = min([now - self._bound_s, *(vote.silent_s for vote in votes)])
        # A coordinator that one of them only did not hear any more may live
        # (test_a_coordinator_that_became_silent_is_not_said_to_have_ended).
        closed = self._closed and all(vote.closed for vote in votes)
        self.leader = LeaderAddress(own.address, own.port, self.term)
        self._poll = None
        self._bound_s = now
        self._enter(VoterState.LEADING)
        self._note("elected", term=self.term, votes=len(votes) + 1, silent_s=silent_s, closed=closed)
        about = now - self._asked_s, max(0.0, silent_s), closed, now - self._job_began_s, self._training_s
        self._out.append(Lead(Succession(self.term, charter, *about)))

    def _fail(self, now: float) -> None:
        limits = self.limits
        pause_s = doubled(limits.stand_again_s, self._failed, limits.stand_again_max_s)
        self._failed += 1
        # Each voter waits for another time: those that stand together split the votes again
        # (test_a_split_vote_is_followed_by_one_winner).
        self._stand_at_s = now + pause_s + self._stagger_s()
        self._poll = None
        self._enter(VoterState.ALONE)

    # ---------------------------------------------------------------- small steps

    def _seat(self) -> Seat | None:
        """Its own; None: it cannot stand."""
        if self.charter is None or not self.stands or len(self.charter.seats) < VOTERS_MIN:
            return None
        return next((seat for seat in self.charter.seats if seat.name == self.name), None)

    @property
    def _may_stand(self) -> bool:
        return self._seat() is not None and not self._leaves

    def _place(self) -> int:
        """The number of voters before it, without the coordinator that is lost."""
        seats = self.charter.seats if self.charter is not None else ()
        names = [seat.name for seat in seats[1:] if not seat.witness]  # the first one is the coordinator's
        return names.index(self.name) if self.name in names else len(names)

    def _stagger_s(self) -> float:
        return PLACE_FACTOR * self.limits.stand_s * self._place()

    def _enter(self, stage: VoterState) -> None:
        if stage is not self.stage:
            assert (self.stage, stage) in TRANSITIONS, f"{self.stage} to {stage}"
            self.stage = stage

    def _note(self, event: str, **fields: object) -> None:
        self._out.append(Note(event, fields))

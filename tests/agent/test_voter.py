"""Voters elect a coordinator: a small harness with several of them, on which messages are delivered by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec import structs

from holdfast.agent import voter as vote
from holdfast.agent.voter import TRANSITIONS, LeaderAddress, Voter, VoterState
from holdfast.protocol.charter import Charter, CharterPosition, Poll, Polled, Renew, Renewed, Seat, Succession
from holdfast.protocol.policy import Limits, Note, Tick

LIMITS = Limits()
STEP_S = 0.001
FOUNDER = 1


def seat(name: str) -> Seat:
    return Seat(name, name[0], f"10.0.0.{ord(name[0]) - 96}", 4000, witness=name.startswith("w"))


def charter(names: str, *, term: int = FOUNDER, number: int = 1, before: str = "") -> Charter:
    """Voters by letters: `abc` are a, b and c."""
    return Charter(CharterPosition(term, number), tuple(map(seat, names)), tuple(map(seat, before)), leader=names[0])


@dataclass(frozen=True)
class Ballot:
    """A question on its way."""

    of: str
    to: str
    poll: Poll


class VoterHarness:
    """Voters by name. All follow a coordinator that has sent them the charter."""

    def __init__(self, names: str, charter: Charter) -> None:
        self.now = 100.0
        self.voters: dict[str, Voter] = {}
        self.ballots: list[Ballot] = []
        self.answers: list[tuple[Ballot, Polled]] = []
        self.renewed: dict[str, Renewed] = {}
        self.led: dict[str, Succession] = {}
        self.winners: dict[int, set[str]] = {}
        for name in names:
            self.boot(name)
            self.renew(name, charter)

    def boot(self, name: str) -> None:
        self.voters[name] = Voter(name, LIMITS, self.now, stands=not name.startswith("w"))

    def give(self, name: str, event: vote.Event) -> Polled | None:
        """Returns the answer to a Poll."""
        voter, answer = self.voters[name], None
        before = voter.term
        for command in voter.handle(self.now, event):
            match command:
                case vote.SendRenewed(renewed):
                    self.renewed[name] = renewed
                case vote.AskVote(to, poll):
                    self.ballots.append(Ballot(name, to.name, poll))
                case vote.AnswerPoll(_, polled):
                    answer = polled
                case vote.Lead(succession):
                    self.led[name] = succession
                    self.winners.setdefault(succession.term, set()).add(name)
                case Note():
                    pass
        voter.check_invariants()
        assert voter.term >= before, "a term goes back"
        assert all(len(names) == 1 for names in self.winners.values()), f"two coordinators in one term: {self.winners}"
        return answer

    def renew(self, name: str, charter: Charter | None, term: int = FOUNDER) -> Renewed:
        self.give(name, vote.RenewCame(Renew(term, 1, charter, JOB_S, TRAINING_S)))
        return self.renewed[name]

    def lose(self, *names: str, closed: bool = True) -> None:
        for name in names:
            self.give(name, vote.Unlinked(self.voters[name].term, closed))

    def wait(self, seconds: float) -> None:
        """Ticks come when they are due."""
        until = self.now + seconds
        while (due := min(self._deadlines(), default=until)) < until:
            self.now = max(self.now, due)
            for name, voter in self.voters.items():
                deadline = voter.next_deadline()
                if deadline is not None and deadline <= self.now:
                    self.give(name, Tick())
            self.now += STEP_S
        self.now = until

    def _deadlines(self) -> list[float]:
        return [due for voter in self.voters.values() if (due := voter.next_deadline()) is not None]

    def ask(self, to: str = "") -> None:
        """Deliver the questions that are on their way (or only those to this one). Who is gone refuses connections."""
        ballots = [ballot for ballot in self.ballots if ballot.to == (to or ballot.to)]
        self.ballots = [ballot for ballot in self.ballots if ballot not in ballots]
        for ballot in ballots:
            if ballot.to not in self.voters:
                self.give(ballot.of, vote.PollFailed(ballot.to, ballot.poll, gone=True))
            elif (polled := self.give(ballot.to, vote.PollCame(1, ballot.poll))) is not None:
                self.answers.append((ballot, polled))

    def answer(self) -> None:
        answers, self.answers = self.answers, []
        for ballot, polled in answers:
            self.give(ballot.of, vote.PolledCame(ballot.to, ballot.poll, polled))

    def elect(self, seconds: float = 5.0) -> None:
        """All questions and answers arrive at once, until somebody has won."""
        until = self.now + seconds
        while self.now < until and not self.led:
            self.ask()
            self.answer()
            self.wait(STEP_S)


def three(closed: bool = True) -> VoterHarness:
    """The voters a, b and c; the coordinator, beside a, is lost, and its host is dead."""
    harness = VoterHarness("abc", charter("abc"))
    del harness.voters["a"]
    harness.now += 1.0
    harness.lose("b", "c", closed=closed)
    return harness


def polled(
    harness: VoterHarness, to: str, of: str, term: int, position: CharterPosition, *, final: bool = True
) -> Polled:
    answer = harness.give(to, vote.PollCame(1, Poll(term, seat(of), position, final)))
    assert answer is not None
    return answer


JOB_S, TRAINING_S = 700.0, 500.0


# --- the usual case ---------------------------------------------------------------------------------------------------


def test_the_first_voter_after_the_coordinators_is_elected_at_once() -> None:
    harness = three()
    began_s = harness.now
    harness.elect()
    assert list(harness.led) == ["b"]
    assert harness.now < began_s + LIMITS.stand_s
    took_s, silent_s = pytest.approx(STEP_S), pytest.approx(1.0 + STEP_S)
    job_s = pytest.approx(JOB_S + 1.0 + STEP_S)
    assert harness.led["b"] == Succession(2, charter("abc"), took_s, silent_s, True, job_s, TRAINING_S)
    assert harness.voters["c"].leader == harness.voters["b"].leader == LeaderAddress("10.0.0.2", 4000, 2)


def test_a_voter_without_a_majority_stands_again_for_an_hour() -> None:
    voter = Voter("a", LIMITS, 100.0, stands=True)
    voter._failed = 5000
    voter._fail(200.0)
    assert 200.0 < voter._stand_at_s < 200.0 + LIMITS.stand_again_max_s + 1.0


def test_an_agent_that_leaves_votes_and_does_not_stand() -> None:
    harness = three()
    harness.wait(STEP_S)
    harness.give("b", vote.Leaves())
    assert harness.voters["b"].next_deadline() is None
    harness.elect()
    assert list(harness.led) == ["c"]


def test_the_winner_follows_the_coordinator_in_its_process() -> None:
    harness = three()
    harness.elect()
    harness.give("b", vote.Linked(2))
    assert harness.voters["b"].stage is VoterState.FOLLOWING
    assert not polled(harness, "b", "c", 3, CharterPosition(9, 9), final=False).granted
    harness.give("b", vote.Unlinked(2, closed=True, local=True))
    assert not polled(harness, "b", "c", 3, CharterPosition(9, 9)).closed, "its process lives"


def test_a_coordinator_that_became_silent_is_not_said_to_have_ended() -> None:
    harness = three()
    harness.give("c", vote.Linked(1))
    harness.lose("c", closed=False)
    harness.elect()
    assert not harness.led["b"].closed


def test_a_voter_that_follows_a_coordinator_votes_for_nobody() -> None:
    harness = VoterHarness("abc", charter("abc"))
    harness.lose("b")
    harness.wait(0.2)
    harness.elect()
    assert not harness.led
    assert harness.voters["b"].term == FOUNDER, "asking changes nothing"
    assert [harness.renew("c", None).rival for _ in "ab"] == [True, False], "its coordinator learns of it"
    assert harness.renew("b", None).term == FOUNDER, "its coordinator can have it back"


def test_a_grant_without_a_winner_is_followed_by_another_election() -> None:
    harness = three()
    harness.ask()  # b asks c, and ends after that
    harness.answer()
    harness.ask()
    assert harness.voters["c"].leader == LeaderAddress("10.0.0.2", 4000, 2)
    del harness.voters["b"]
    harness.answers.clear()
    harness.wait(LIMITS.poll_s - STEP_S)
    assert not harness.ballots, "it gives the winner time"
    harness.wait(LIMITS.poll_s)
    assert {ballot.of for ballot in harness.ballots} == {"c"}


def test_it_waits_for_a_newer_coordinator_that_others_know() -> None:
    harness = three()
    harness.give("c", vote.HeardOf(2, "10.0.0.2", 4000))
    harness.give("c", vote.HeardOf(1, "10.0.0.1", 4000))
    harness.wait(LIMITS.poll_s - STEP_S)
    assert {ballot.of for ballot in harness.ballots} == {"b"}
    assert harness.voters["c"].leader == LeaderAddress("10.0.0.2", 4000, 2)


# --- what must not happen ---------------------------------------------------------------------------------------------


def test_two_candidates_of_one_term_never_both_win() -> None:
    harness = VoterHarness("abcd", charter("abcd"))
    del harness.voters["a"]
    harness.lose("b", "c", "d")
    harness.wait(LIMITS.stand_s + 2 * STEP_S)
    assert {ballot.of for ballot in harness.ballots} == {"b", "c"}
    harness.ask()
    harness.answer()  # both stand
    assert [ballot.of for ballot in harness.ballots if ballot.poll.final] == ["b"] * 3 + ["c"] * 3
    harness.ask("d")
    harness.answer()
    harness.ask()
    harness.answer()
    assert not harness.led, "d's only vote is not enough for one of them"
    harness.elect()
    assert len(harness.led) == 1


def test_a_split_vote_is_followed_by_one_winner() -> None:
    harness = three()
    harness.wait(LIMITS.stand_s + 2 * STEP_S)
    harness.ask()
    harness.answer()
    assert {ballot.of for ballot in harness.ballots if ballot.poll.final} == {"b", "c"}, "each votes for itself"
    harness.ask()
    harness.answer()
    assert not harness.led
    harness.elect()
    assert list(harness.led) == ["b"]


def test_one_vote_per_term() -> None:
    harness = three()
    newest = CharterPosition(FOUNDER, 1)
    assert polled(harness, "c", "b", 5, newest).granted
    assert not polled(harness, "c", "a", 5, newest).granted
    assert polled(harness, "c", "b", 5, newest).granted, "the same vote, for a question that came twice"
    assert not polled(harness, "c", "b", 4, newest).granted
    assert polled(harness, "c", "a", 6, newest).granted


def test_a_newer_charter_wins() -> None:
    harness = three()
    harness.renew("c", charter("abc", number=2))
    harness.lose("c")
    assert not polled(harness, "c", "b", 2, CharterPosition(FOUNDER, 1)).granted
    harness.elect()
    assert harness.led["b"].charter == charter("abc", number=2), "b takes it from the denial"


def test_a_term_counts_more_than_a_number() -> None:
    harness = three()
    harness.renew("c", charter("abc", number=9))
    assert harness.renew("c", charter("abc", term=2, number=1), term=2).held == CharterPosition(2, 1)
    assert harness.renew("c", charter("abc", number=9), term=2).held == CharterPosition(2, 1)


def test_after_a_vote_it_confirms_no_coordinator_of_an_earlier_term_and_no_founder_of_this() -> None:
    harness = three()
    polled(harness, "c", "b", 2, CharterPosition(FOUNDER, 1))
    assert harness.renew("c", charter("abc", number=7)) == Renewed(2, 1, CharterPosition(FOUNDER, 1))
    harness.give("c", vote.Linked(FOUNDER))
    assert harness.voters["c"].stage is VoterState.ALONE
    harness.renewed.clear()
    harness.give("c", vote.RenewCame(Renew(2, 1, founded=True)))
    assert not harness.renewed, "one that founded the job again may have taken the same term, without a vote"
    assert harness.renew("c", None, term=2).term == 2, "that was elected, perhaps by others"


def test_lost_answers_do_not_elect() -> None:
    harness = three()
    harness.voters["c"].limits = structs.replace(LIMITS, stand_s=60.0)
    for _ in range(4):
        harness.ask()
        harness.answer()
        harness.ask()
        harness.answers.clear()
        harness.wait(3 * LIMITS.poll_s)
    assert not harness.led
    assert harness.voters["b"].term > 2, "each attempt has its own term"


def test_an_answer_to_an_earlier_question_is_no_vote() -> None:
    harness = three()
    harness.ask()
    late = harness.answers.copy()
    harness.answer()
    assert harness.voters["b"].stage is VoterState.STANDING
    harness.answers = late
    harness.answer()
    assert not harness.led, "to say that one would vote is no vote"


def test_a_voter_that_restarts_is_another_one() -> None:
    harness = three()
    harness.ask()
    harness.answer()
    (ballot,) = (ballot for ballot in harness.ballots if ballot.to == "c")
    harness.voters["c"] = Voter("c#2", LIMITS, harness.now, stands=True)
    answer = harness.give("c", vote.PollCame(1, ballot.poll))
    assert answer is not None
    harness.give("b", vote.PolledCame("c", ballot.poll, answer))
    assert not harness.led


def test_while_the_voters_change_both_majorities_are_needed() -> None:
    harness = VoterHarness("abcdef", charter("def", before="abc", number=2))
    for name in "ab":
        del harness.voters[name]
    harness.lose("c", "d", "e", "f")
    harness.elect()
    assert not harness.led, "d, e and f alone are not enough"
    harness.boot("b")
    harness.elect()
    assert len(harness.led) == 1


def test_it_joins_no_coordinator_that_founded_the_job_again() -> None:
    harness = three()
    voter = harness.voters["b"]
    assert voter.elects(harness.now)
    assert voter.ignores(harness.now, "a#2", 1, founded=True)
    assert not voter.ignores(harness.now, "a", 1, founded=True), "the one it has lost"
    assert not voter.ignores(harness.now, "d", 2, founded=False), "one that was elected"
    assert not voter.ignores(harness.now + LIMITS.elect_s, "a#2", 1, founded=True), "the others are lost, too"


def test_a_founder_hears_of_the_charter() -> None:
    harness = three()
    voter = harness.voters["b"]
    waiting, joining = (
        voter.charter_report(harness.now + after_s, "a#2", 1, founded=True, forms=True)
        for after_s in (0.0, LIMITS.elect_s)
    )
    assert waiting is not None
    assert joining is not None
    assert (waiting.charter, waiting.patience_s) == (voter.charter, LIMITS.elect_s)
    assert (joining.patience_s, joining.lost_s) == (0.0, LIMITS.elect_s)
    assert voter.charter_report(harness.now, "a", 1, founded=True, forms=True) is None, "the one that wrote it"
    assert voter.charter_report(harness.now, "d", 2, founded=False, forms=False) is None, "one that was elected"
    assert voter.charter_report(harness.now, "a#2", 1, founded=True, forms=False) is None, "it trains already"
    over = voter.charter_report(harness.now, "a#2", 1, founded=False, forms=True)
    assert over is not None, "it waits for nobody, and may know of an older charter only"
    assert over.patience_s == 0.0


def test_a_voter_that_follows_a_coordinator_tells_a_founder_that_it_lives() -> None:
    """And the coordinator that somebody else wants to be one: it steps aside if it has too few nodes."""
    harness = VoterHarness("abc", charter("abc"))
    voter = harness.voters["b"]
    harness.now += 100.0
    assert voter.calls
    report = voter.charter_report(harness.now, "d#2", 1, founded=True, forms=True)
    assert report is not None
    assert (report.charter, report.lost_s, report.follows) == (voter.charter, 0.0, True)
    assert report.patience_s == LIMITS.fence_s + LIMITS.kill_s
    harness.give("b", vote.FounderMet())
    assert [harness.renew("b", None).rival for _ in range(2)] == [True, False]
    harness.lose("b")
    assert not voter.calls
    harness.give("b", vote.FounderMet())
    assert not harness.renew("b", None).rival


def test_who_has_no_vote_tells_a_founder_once() -> None:
    harness = three()
    voter = harness.voters["x"] = Voter("x", LIMITS, harness.now, stands=True)
    voter.charter = harness.voters["b"].charter
    assert [voter.charter_report(harness.now, "a#2", 1, founded=True, forms=True) is None for _ in range(2)] == [
        False,
        True,
    ]


def test_it_gives_the_job_up_when_a_majority_has_ended() -> None:
    harness = three()
    del harness.voters["c"]
    harness.elect(0.5)
    assert not harness.voters["b"].elects(harness.now)


def test_it_joins_what_the_others_have_joined() -> None:
    harness = three()
    harness.give("c", vote.Linked(2))
    harness.elect(0.5)
    assert not harness.voters["b"].ignores(harness.now, "a#2", 2, founded=True)
    assert harness.voters["b"].ignores(harness.now, "a#3", 3, founded=True)


def test_two_voters_elect_nobody() -> None:
    harness = VoterHarness("ab", charter("ab"))
    harness.lose("a", "b")
    harness.elect()
    assert not harness.led


# --- silence ----------------------------------------------------------------------------------------------------------


def test_silence_counts_from_what_the_voter_last_confirmed() -> None:
    harness = VoterHarness("abc", charter("abc"))
    harness.wait(3.0)
    harness.renew("b", None)
    harness.wait(2.0)
    harness.lose("b", "c", closed=False)
    assert polled(harness, "b", "c", 2, CharterPosition(FOUNDER, 1)).silent_s == pytest.approx(2.0)
    harness.wait(0.5)
    assert polled(harness, "b", "c", 3, CharterPosition(FOUNDER, 1)).silent_s == pytest.approx(0.5), (
        "it has voted meanwhile"
    )


def test_the_coordinators_own_voter_counts_until_it_stepped_down() -> None:
    harness = VoterHarness("abc", charter("abc"))
    harness.wait(0.4)
    harness.give("a", vote.Unlinked(FOUNDER, closed=True, local=True))
    assert polled(harness, "a", "c", 2, CharterPosition(FOUNDER, 1)).silent_s == 0.0


def test_a_renew_that_comes_after_the_loss_brings_no_coordinator_back() -> None:
    """Such an agent would not elect, and would found the job again beside its voters."""
    harness = VoterHarness("abc", charter("abc"))
    harness.give("a", vote.Unlinked(FOUNDER, closed=False, local=True))
    assert harness.renew("a", None).term == FOUNDER
    assert harness.voters["a"].stage is VoterState.ALONE
    assert harness.voters["a"].elects(harness.now)
    harness.renew("a", None, FOUNDER + 1)  # a founder that takes a later term informs those that have joined it
    assert harness.voters["a"].stage is VoterState.FOLLOWING


# --- witnesses --------------------------------------------------------------------------------------------------------


def test_a_witness_votes_and_never_stands() -> None:
    harness = VoterHarness("abw", charter("abw"))
    del harness.voters["a"]
    harness.lose("w")
    harness.wait(10.0)
    assert not harness.ballots
    harness.lose("b")
    harness.elect()
    assert list(harness.led) == ["b"]


def test_a_witness_notices_by_itself_that_the_coordinator_is_silent() -> None:
    harness = VoterHarness("abw", charter("abw"))
    harness.lose("b", closed=False)
    harness.wait(LIMITS.fence_s - STEP_S)
    assert not polled(harness, "w", "b", 2, CharterPosition(FOUNDER, 1)).granted
    harness.wait(2 * STEP_S)
    assert polled(harness, "w", "b", 2, CharterPosition(FOUNDER, 1)).granted


def test_what_only_a_witness_has_reaches_a_candidate() -> None:
    harness = VoterHarness("abcw", charter("abcw"))
    del harness.voters["a"]
    harness.renew("w", charter("abcw", number=2))
    harness.lose("b", "c", "w")
    harness.elect()
    assert harness.led["b"].charter == charter("abcw", number=2)


def test_what_only_a_witness_has_reaches_a_voter_that_does_not_know_of_its_seat() -> None:
    harness = VoterHarness("abw", charter("abw"))
    harness.boot("c")
    del harness.voters["a"]
    harness.renew("w", charter("acw", number=2))
    harness.lose("b", "w")
    harness.elect()
    assert list(harness.led) == ["c"]
    assert harness.led["c"].charter == charter("acw", number=2)


def test_a_charter_is_passed_on_once_for_each_question() -> None:
    harness = VoterHarness("abw", charter("abw"))
    harness.boot("c")
    harness.renew("w", charter("acw", number=2))
    harness.lose("b", "w")
    harness.wait(1.0)
    harness.ask(to="w")
    harness.answer()
    passed_on = [ballot for ballot in harness.ballots if ballot.poll.charter is not None]
    assert sorted(ballot.to for ballot in passed_on) == ["a", "c"]
    harness.ballots = passed_on
    harness.ask(to="c")
    harness.answer()
    assert all(ballot.poll.charter is None for ballot in harness.ballots if ballot not in passed_on)


def test_the_end_of_an_older_link_says_nothing_about_a_newer_coordinator() -> None:
    harness = VoterHarness("abw", charter("abw"))
    harness.renew("w", None, term=2)
    harness.give("w", vote.Unlinked(FOUNDER, closed=True))
    assert harness.voters["w"].stage is VoterState.FOLLOWING


def test_every_transition_is_listed_once_and_starts_where_another_ends() -> None:
    assert {old for old, _ in TRANSITIONS} == {new for _, new in TRANSITIONS} == set(VoterState)

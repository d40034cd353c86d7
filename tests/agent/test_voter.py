"""Voters elect a coordinator: a small desk with several of them, on which messages are delivered by hand."""

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


class Desk:
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


def three(closed: bool = True) -> Desk:
    """The voters a, b and c; the coordinator, beside a, is lost, and its host is dead."""
    desk = Desk("abc", charter("abc"))
    del desk.voters["a"]
    desk.now += 1.0
    desk.lose("b", "c", closed=closed)
    return desk


def polled(desk: Desk, to: str, of: str, term: int, position: CharterPosition, *, final: bool = True) -> Polled:
    answer = desk.give(to, vote.PollCame(1, Poll(term, seat(of), position, final)))
    assert answer is not None
    return answer


JOB_S, TRAINING_S = 700.0, 500.0


# --- the usual case ---------------------------------------------------------------------------------------------------


def test_the_first_voter_after_the_coordinators_is_elected_at_once() -> None:
    desk = three()
    began_s = desk.now
    desk.elect()
    assert list(desk.led) == ["b"]
    assert desk.now < began_s + LIMITS.stand_s
    took_s, silent_s = pytest.approx(STEP_S), pytest.approx(1.0 + STEP_S)
    job_s = pytest.approx(JOB_S + 1.0 + STEP_S)
    assert desk.led["b"] == Succession(2, charter("abc"), took_s, silent_s, True, job_s, TRAINING_S)
    assert desk.voters["c"].leader == desk.voters["b"].leader == LeaderAddress("10.0.0.2", 4000, 2)


def test_an_agent_that_leaves_votes_and_does_not_stand() -> None:
    desk = three()
    desk.wait(STEP_S)
    desk.give("b", vote.Leaves())
    assert desk.voters["b"].next_deadline() is None
    desk.elect()
    assert list(desk.led) == ["c"]


def test_the_winner_follows_the_coordinator_in_its_process() -> None:
    desk = three()
    desk.elect()
    desk.give("b", vote.Linked(2))
    assert desk.voters["b"].stage is VoterState.FOLLOWING
    assert not polled(desk, "b", "c", 3, CharterPosition(9, 9), final=False).granted
    desk.give("b", vote.Unlinked(2, closed=True, local=True))
    assert not polled(desk, "b", "c", 3, CharterPosition(9, 9)).closed, "its process lives"


def test_a_coordinator_that_became_silent_is_not_said_to_have_ended() -> None:
    desk = three()
    desk.give("c", vote.Linked(1))
    desk.lose("c", closed=False)
    desk.elect()
    assert not desk.led["b"].closed


def test_a_voter_that_follows_a_coordinator_votes_for_nobody() -> None:
    desk = Desk("abc", charter("abc"))
    desk.lose("b")
    desk.wait(0.2)
    desk.elect()
    assert not desk.led
    assert desk.voters["b"].term == FOUNDER, "asking changes nothing"
    assert [desk.renew("c", None).rival for _ in "ab"] == [True, False], "its coordinator learns of it"
    assert desk.renew("b", None).term == FOUNDER, "its coordinator can have it back"


def test_a_grant_without_a_winner_is_followed_by_another_election() -> None:
    desk = three()
    desk.ask()  # b asks c, and ends after that
    desk.answer()
    desk.ask()
    assert desk.voters["c"].leader == LeaderAddress("10.0.0.2", 4000, 2)
    del desk.voters["b"]
    desk.answers.clear()
    desk.wait(LIMITS.poll_s - STEP_S)
    assert not desk.ballots, "it gives the winner time"
    desk.wait(LIMITS.poll_s)
    assert {ballot.of for ballot in desk.ballots} == {"c"}


def test_it_waits_for_a_newer_coordinator_that_others_know() -> None:
    desk = three()
    desk.give("c", vote.HeardOf(2, "10.0.0.2", 4000))
    desk.give("c", vote.HeardOf(1, "10.0.0.1", 4000))
    desk.wait(LIMITS.poll_s - STEP_S)
    assert {ballot.of for ballot in desk.ballots} == {"b"}
    assert desk.voters["c"].leader == LeaderAddress("10.0.0.2", 4000, 2)


# --- what must not happen ---------------------------------------------------------------------------------------------


def test_two_candidates_of_one_term_never_both_win() -> None:
    desk = Desk("abcd", charter("abcd"))
    del desk.voters["a"]
    desk.lose("b", "c", "d")
    desk.wait(LIMITS.stand_s + 2 * STEP_S)
    assert {ballot.of for ballot in desk.ballots} == {"b", "c"}
    desk.ask()
    desk.answer()  # both stand
    assert [ballot.of for ballot in desk.ballots if ballot.poll.final] == ["b"] * 3 + ["c"] * 3
    desk.ask("d")
    desk.answer()
    desk.ask()
    desk.answer()
    assert not desk.led, "d's only vote is not enough for one of them"
    desk.elect()
    assert len(desk.led) == 1


def test_a_split_vote_is_followed_by_one_winner() -> None:
    desk = three()
    desk.wait(LIMITS.stand_s + 2 * STEP_S)
    desk.ask()
    desk.answer()
    assert {ballot.of for ballot in desk.ballots if ballot.poll.final} == {"b", "c"}, "each votes for itself"
    desk.ask()
    desk.answer()
    assert not desk.led
    desk.elect()
    assert list(desk.led) == ["b"]


def test_one_vote_per_term() -> None:
    desk = three()
    newest = CharterPosition(FOUNDER, 1)
    assert polled(desk, "c", "b", 5, newest).granted
    assert not polled(desk, "c", "a", 5, newest).granted
    assert polled(desk, "c", "b", 5, newest).granted, "the same vote, for a question that came twice"
    assert not polled(desk, "c", "b", 4, newest).granted
    assert polled(desk, "c", "a", 6, newest).granted


def test_a_newer_charter_wins() -> None:
    desk = three()
    desk.renew("c", charter("abc", number=2))
    desk.lose("c")
    assert not polled(desk, "c", "b", 2, CharterPosition(FOUNDER, 1)).granted
    desk.elect()
    assert desk.led["b"].charter == charter("abc", number=2), "b takes it from the denial"


def test_a_term_counts_more_than_a_number() -> None:
    desk = three()
    desk.renew("c", charter("abc", number=9))
    assert desk.renew("c", charter("abc", term=2, number=1), term=2).held == CharterPosition(2, 1)
    assert desk.renew("c", charter("abc", number=9), term=2).held == CharterPosition(2, 1)


def test_after_a_vote_it_confirms_no_coordinator_of_an_earlier_term_and_no_founder_of_this() -> None:
    desk = three()
    polled(desk, "c", "b", 2, CharterPosition(FOUNDER, 1))
    assert desk.renew("c", charter("abc", number=7)) == Renewed(2, 1, CharterPosition(FOUNDER, 1))
    desk.give("c", vote.Linked(FOUNDER))
    assert desk.voters["c"].stage is VoterState.ALONE
    desk.renewed.clear()
    desk.give("c", vote.RenewCame(Renew(2, 1, founded=True)))
    assert not desk.renewed, "one that founded the job again may have taken the same term, without a vote"
    assert desk.renew("c", None, term=2).term == 2, "that was elected, perhaps by others"


def test_lost_answers_do_not_elect() -> None:
    desk = three()
    desk.voters["c"].limits = structs.replace(LIMITS, stand_s=60.0)
    for _ in range(4):
        desk.ask()
        desk.answer()
        desk.ask()
        desk.answers.clear()
        desk.wait(3 * LIMITS.poll_s)
    assert not desk.led
    assert desk.voters["b"].term > 2, "each attempt has its own term"


def test_an_answer_to_an_earlier_question_is_no_vote() -> None:
    desk = three()
    desk.ask()
    late = desk.answers.copy()
    desk.answer()
    assert desk.voters["b"].stage is VoterState.STANDING
    desk.answers = late
    desk.answer()
    assert not desk.led, "to say that one would vote is no vote"


def test_a_voter_that_restarts_is_another_one() -> None:
    desk = three()
    desk.ask()
    desk.answer()
    (ballot,) = (ballot for ballot in desk.ballots if ballot.to == "c")
    desk.voters["c"] = Voter("c#2", LIMITS, desk.now, stands=True)
    answer = desk.give("c", vote.PollCame(1, ballot.poll))
    assert answer is not None
    desk.give("b", vote.PolledCame("c", ballot.poll, answer))
    assert not desk.led


def test_while_the_voters_change_both_majorities_are_needed() -> None:
    desk = Desk("abcdef", charter("def", before="abc", number=2))
    for name in "ab":
        del desk.voters[name]
    desk.lose("c", "d", "e", "f")
    desk.elect()
    assert not desk.led, "d, e and f alone are not enough"
    desk.boot("b")
    desk.elect()
    assert len(desk.led) == 1


def test_it_joins_no_coordinator_that_founded_the_job_again() -> None:
    desk = three()
    voter = desk.voters["b"]
    assert voter.elects(desk.now)
    assert voter.ignores(desk.now, "a#2", 1, founded=True)
    assert not voter.ignores(desk.now, "a", 1, founded=True), "the one it has lost"
    assert not voter.ignores(desk.now, "d", 2, founded=False), "one that was elected"
    assert not voter.ignores(desk.now + LIMITS.elect_s, "a#2", 1, founded=True), "the others are lost, too"


def test_a_founder_hears_of_the_charter() -> None:
    desk = three()
    voter = desk.voters["b"]
    waiting, joining = (
        voter.recall(desk.now + after_s, "a#2", 1, founded=True, forms=True) for after_s in (0.0, LIMITS.elect_s)
    )
    assert waiting is not None
    assert joining is not None
    assert (waiting.charter, waiting.patience_s) == (voter.charter, LIMITS.elect_s)
    assert (joining.patience_s, joining.lost_s) == (0.0, LIMITS.elect_s)
    assert voter.recall(desk.now, "a", 1, founded=True, forms=True) is None, "the one that wrote it"
    assert voter.recall(desk.now, "d", 2, founded=False, forms=False) is None, "one that was elected"
    assert voter.recall(desk.now, "a#2", 1, founded=True, forms=False) is None, "it trains already"
    over = voter.recall(desk.now, "a#2", 1, founded=False, forms=True)
    assert over is not None, "it waits for nobody, and may know of an older charter only"
    assert over.patience_s == 0.0


def test_who_has_no_vote_tells_a_founder_once() -> None:
    desk = three()
    voter = desk.voters["x"] = Voter("x", LIMITS, desk.now, stands=True)
    voter.charter = desk.voters["b"].charter
    assert [voter.recall(desk.now, "a#2", 1, founded=True, forms=True) is None for _ in range(2)] == [False, True]


def test_it_gives_the_job_up_when_a_majority_has_ended() -> None:
    desk = three()
    del desk.voters["c"]
    desk.elect(0.5)
    assert not desk.voters["b"].elects(desk.now)


def test_it_joins_what_the_others_have_joined() -> None:
    desk = three()
    desk.give("c", vote.Linked(2))
    desk.elect(0.5)
    assert not desk.voters["b"].ignores(desk.now, "a#2", 2, founded=True)
    assert desk.voters["b"].ignores(desk.now, "a#3", 3, founded=True)


def test_two_voters_elect_nobody() -> None:
    desk = Desk("ab", charter("ab"))
    desk.lose("a", "b")
    desk.elect()
    assert not desk.led


# --- silence ----------------------------------------------------------------------------------------------------------


def test_silence_counts_from_what_the_voter_last_confirmed() -> None:
    desk = Desk("abc", charter("abc"))
    desk.wait(3.0)
    desk.renew("b", None)
    desk.wait(2.0)
    desk.lose("b", "c", closed=False)
    assert polled(desk, "b", "c", 2, CharterPosition(FOUNDER, 1)).silent_s == pytest.approx(2.0)
    desk.wait(0.5)
    assert polled(desk, "b", "c", 3, CharterPosition(FOUNDER, 1)).silent_s == pytest.approx(0.5), (
        "it has voted meanwhile"
    )


def test_the_coordinators_own_voter_counts_until_it_stepped_down() -> None:
    desk = Desk("abc", charter("abc"))
    desk.wait(0.4)
    desk.give("a", vote.Unlinked(FOUNDER, closed=True, local=True))
    assert polled(desk, "a", "c", 2, CharterPosition(FOUNDER, 1)).silent_s == 0.0


def test_a_renew_that_comes_after_the_loss_brings_no_coordinator_back() -> None:
    """Such an agent would not elect, and would found the job again beside its voters."""
    desk = Desk("abc", charter("abc"))
    desk.give("a", vote.Unlinked(FOUNDER, closed=False, local=True))
    assert desk.renew("a", None).term == FOUNDER
    assert desk.voters["a"].stage is VoterState.ALONE
    assert desk.voters["a"].elects(desk.now)
    desk.renew("a", None, FOUNDER + 1)  # a founder that takes a later term informs those that have joined it
    assert desk.voters["a"].stage is VoterState.FOLLOWING


# --- witnesses --------------------------------------------------------------------------------------------------------


def test_a_witness_votes_and_never_stands() -> None:
    desk = Desk("abw", charter("abw"))
    del desk.voters["a"]
    desk.lose("w")
    desk.wait(10.0)
    assert not desk.ballots
    desk.lose("b")
    desk.elect()
    assert list(desk.led) == ["b"]


def test_a_witness_notices_by_itself_that_the_coordinator_is_silent() -> None:
    desk = Desk("abw", charter("abw"))
    desk.lose("b", closed=False)
    desk.wait(LIMITS.fence_s - STEP_S)
    assert not polled(desk, "w", "b", 2, CharterPosition(FOUNDER, 1)).granted
    desk.wait(2 * STEP_S)
    assert polled(desk, "w", "b", 2, CharterPosition(FOUNDER, 1)).granted


def test_what_only_a_witness_has_reaches_a_candidate() -> None:
    desk = Desk("abcw", charter("abcw"))
    del desk.voters["a"]
    desk.renew("w", charter("abcw", number=2))
    desk.lose("b", "c", "w")
    desk.elect()
    assert desk.led["b"].charter == charter("abcw", number=2)


def test_what_only_a_witness_has_reaches_a_voter_that_does_not_know_of_its_seat() -> None:
    desk = Desk("abw", charter("abw"))
    desk.boot("c")
    del desk.voters["a"]
    desk.renew("w", charter("acw", number=2))
    desk.lose("b", "w")
    desk.elect()
    assert list(desk.led) == ["c"]
    assert desk.led["c"].charter == charter("acw", number=2)


def test_a_charter_is_passed_on_once_for_each_question() -> None:
    desk = Desk("abw", charter("abw"))
    desk.boot("c")
    desk.renew("w", charter("acw", number=2))
    desk.lose("b", "w")
    desk.wait(1.0)
    desk.ask(to="w")
    desk.answer()
    passed_on = [ballot for ballot in desk.ballots if ballot.poll.charter is not None]
    assert sorted(ballot.to for ballot in passed_on) == ["a", "c"]
    desk.ballots = passed_on
    desk.ask(to="c")
    desk.answer()
    assert all(ballot.poll.charter is None for ballot in desk.ballots if ballot not in passed_on)


def test_the_end_of_an_older_link_says_nothing_about_a_newer_coordinator() -> None:
    desk = Desk("abw", charter("abw"))
    desk.renew("w", None, term=2)
    desk.give("w", vote.Unlinked(FOUNDER, closed=True))
    assert desk.voters["w"].stage is VoterState.FOLLOWING


def test_every_transition_is_listed_once_and_starts_where_another_ends() -> None:
    assert {old for old, _ in TRANSITIONS} == {new for _, new in TRANSITIONS} == set(VoterState)

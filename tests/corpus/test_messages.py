"""What library messages are taken for: rules are written against one half of the collection and judged by the other."""

from __future__ import annotations

import pytest

from holdfast.insight.causes.rules import texts
from tests.corpus.messages import messages, right_share, wrong

SHARE_MIN = {"learned": 0.98, "held_out": 0.95}


@pytest.mark.parametrize("half", SHARE_MIN)
def test_the_share_of_right_causes(half: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = messages(half)
    share = right_share(found)
    with capsys.disabled():
        print(f"\n{half}: {len(found)} messages, right cause {share:.3f}", *wrong(found), sep="\n")
    assert share >= SHARE_MIN[half]


def test_no_message_is_in_both_halves_and_each_has_a_cause_that_exists() -> None:
    halves = [messages(half) for half in SHARE_MIN]
    first, second = ({(each.failure.message, each.failure.stderr_tail) for each in half} for half in halves)
    assert not first & second
    assert {each.code for half in halves for each in half} <= set(texts())

"""How long a worker may take to leave its generation on a machine with more to do than processors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.linux import process_stat
from holdfast.supervisor.processes import wanted_s
from holdfast.supervisor.release import Lateness, allowed_s
from tests.support.limits import until


@pytest.mark.parametrize(
    ("waited_s", "allowed"), [(0.0, 2.0), (0.5, 2.5), (2.0, 4.0), (60.0, 4.0)], ids=["none", "some", "much", "too much"]
)
def test_the_time_of_waiting_is_given_once_more_up_to_a_limit(waited_s: float, allowed: float) -> None:
    assert allowed_s(2.0, waited_s) == allowed


@pytest.fixture
def rivals() -> Iterator[list[int]]:
    """Two processes that compute on one processor."""
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    made = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    yield [each.pid for each in made]
    for each in made:
        each.kill()
        each.wait()


def test_who_has_to_share_a_processor_waits_and_who_is_suspended_does_not(rivals: list[int]) -> None:
    late = Lateness(rivals[0])
    assert late.waited_s() == 0.0, "the time before the first look does not count"
    until(lambda: late.waited_s() > 0.1, "it waits for the other one")
    os.kill(rivals[0], signal.SIGSTOP)
    until(lambda: (stat := process_stat(rivals[0])) is not None and stat.state == "T", "it is suspended")
    waited_s, used_s = late.waited_s(), wanted_s(rivals[1], all_threads=False)
    until(lambda: wanted_s(rivals[1], all_threads=False) > used_s + 0.2, "the other one has gone on alone")
    assert late.waited_s() == waited_s


def test_of_a_process_that_is_gone_nothing_is_known(rivals: list[int]) -> None:
    late = Lateness(rivals[0])
    late.waited_s()
    os.kill(rivals[0], signal.SIGKILL)
    until(lambda: (stat := process_stat(rivals[0])) is None or stat.state == "Z", "it has ended")
    assert late.waited_s() >= 0.0
    assert Lateness(2**22 + 1).waited_s() == 0.0

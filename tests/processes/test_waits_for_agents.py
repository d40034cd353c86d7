"""What the tests of this folder wait with: an agent that has ended lets no test wait to the end of its time."""

from __future__ import annotations

import pytest

from tests.processes.conftest import JobFolder, while_running


def test_a_wait_fails_with_the_screen_when_its_agent_has_ended(job_folder: JobFolder) -> None:
    agent = job_folder.start("--standalone", job_folder.script("raise ValueError('too early')"))
    with pytest.raises(pytest.fail.Exception, match=r"1 of 1 agents ended meanwhile(.|\n)*ValueError: too early"):
        while_running(lambda: False, agent)


def test_what_came_true_before_the_end_is_no_failure(job_folder: JobFolder) -> None:
    agent = job_folder.ends(0, "--standalone", job_folder.script("note('done')"))
    assert while_running(lambda: job_folder.trail("done"), agent)

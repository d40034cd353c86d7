"""Jobs on pretend hosts. Without root, or where the machine makes no namespaces, these tests are skipped and say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.network.hosts import PretendHosts, why_not
from tests.network.job_agents import JobAgents

MakeFleet = Callable[[int], JobAgents]


@pytest.fixture
def job_agents(tmp_path: Path) -> Iterator[MakeFleet]:
    """`job_agents(3)`: three hosts, on which a job can be started."""
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as stack:

        def make(count: int) -> JobAgents:
            hosts = stack.enter_context(PretendHosts(count, tmp_path / "hosts"))
            return JobAgents(hosts, tmp_path)

        yield make

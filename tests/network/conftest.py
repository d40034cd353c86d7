"""Jobs on pretend hosts. Without root, or where the machine makes no namespaces, these tests are skipped and say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.network.fleet import Fleet
from tests.network.hosts import PretendHosts, why_not

MakeFleet = Callable[[int], Fleet]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[MakeFleet]:
    """`fleet(3)`: three hosts, on which a job can be started."""
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as stack:

        def make(count: int) -> Fleet:
            hosts = stack.enter_context(PretendHosts(count, tmp_path / "hosts"))
            return Fleet(hosts, tmp_path)

        yield make

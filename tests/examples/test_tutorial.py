"""docs/tutorial.md, typed as it stands: its files are saved, its commands run, and what it shows is what comes. Commands
are typed twice where that is possible.

A `console` block is one session of a shell: lines after `$ ` are typed, the others have to appear in this order. `…` stands
for anything, a line of its own for any lines. Comments before a block say what a reader does with their hands. `holdfast` is
forked from a process that has imported torch (tests/warm_jobs.py).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.limits import limit_s
from tests.warm import Warm
from tests.warm_jobs import WarmJobs

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "tutorial.md"
BLOCK = re.compile(r"(?:<!-- ([^\n]*) -->\n)?```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)\n```\n", re.DOTALL)
LIMIT_S = 100

pytestmark = [pytest.mark.xdist_group("torch tutorial"), pytest.mark.slow]


class Block(NamedTuple):
    comment: str
    kind: str
    title: str
    text: str


def blocks() -> Iterator[Block]:
    for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        yield Block(found[1] or "", found[2], found[3] or "", found[4])


class Reader:
    """Somebody at a shell, in a folder of their own."""

    def __init__(self, folder: Path, port: int, programs: Path) -> None:
        """`programs`: where `holdfast` is found."""
        self.folder = folder
        self.port = port
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        self.environment = environment | {"PATH": f"{programs}:{environment['PATH']}", "COLUMNS": "200"}
        self.running: list[tuple[Block, subprocess.Popen[str]]] = []

    def read(self, block: Block) -> None:
        match block.kind, block.comment:
            case "python", _:
                (self.folder / block.title).write_text(block.text + "\n", encoding="utf-8")
            case "console", "in the background":
                self.running.append((block, self.start(block)))
            case "console", "twice at once":
                for session in [self.start(block), self.start(block)]:
                    self.compare(block, session)
            case "console", comment if comment.startswith("first: "):
                self.compare(block, self.start(block, before=comment.removeprefix("first: ")))
                for earlier, session in self.running:
                    self.compare(earlier, session)
                    assert session.returncode == 75
                self.running.clear()
            case "console", "":
                self.compare(block, self.start(block))

    def start(self, block: Block, before: str = ":") -> subprocess.Popen[str]:
        typed = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
        script = "\n".join([before, *typed]).replace("29400", str(self.port))
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def compare(self, block: Block, session: subprocess.Popen[str]) -> None:
        said, _ = session.communicate(timeout=limit_s(LIMIT_S))
        shown = [line for line in block.text.splitlines() if not line.startswith("$ ")]
        lines = iter(said.splitlines())
        for each in shown:
            if each != "…":
                pattern = "(?:.*)".join(map(re.escape, each.split("…")))
                assert any(re.fullmatch(pattern, line) for line in lines), f"not there: {each}\n--- said:\n{said}"

    def repeat(self, block: Block) -> None:
        """Types the block again, as after a requeue: a job that had ended well ends well again."""
        fails = any("Traceback" in line for line in block.text.splitlines())
        session = self.start(block)
        said, _ = session.communicate(timeout=limit_s(LIMIT_S))
        assert ("Traceback" in said) == fails, said
        assert session.returncode == 0, said

    def go(self) -> None:
        """Ends what a failed test has left: agents end by SIGTERM, and their workers with them."""
        for _, session in self.running:
            session.terminate()
            session.wait(limit_s(LIMIT_S))


@pytest.fixture
def reader(
    warm: Warm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[Reader]:
    with WarmJobs(warm, tmp_path_factory.mktemp("jobs")) as jobs:
        made = Reader(tmp_path, free_port(), jobs.folder)
        yield made
        made.go()


@pytest.mark.timeout(300)
def test_a_newcomer_types_all_of_it(reader: Reader) -> None:
    for block in blocks():
        reader.read(block)
    assert not reader.running
    for block in blocks():
        if (block.kind, block.comment) == ("console", ""):
            reader.repeat(block)


def test_every_block_of_the_page_is_known() -> None:
    kinds = [block.kind for block in blocks()]
    assert kinds.count("console") >= 9
    assert kinds.count("python") == 2
    fences = re.findall(r"^```(\w*)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {kind for kind in fences if kind} == {"console", "python"}

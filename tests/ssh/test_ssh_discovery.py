"""The user's program that tells which hosts there are: when its answer counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.ssh import hosts
from holdfast.ssh.hosts import Discovery, HostSpec
from tests.support.limits import limit_s

ANSWER_S = round(limit_s(0.25), 1)
"""A program that answers at all does so within this time on a slow machine too."""


def test_an_answer_counts_when_it_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "ANSWER_S", ANSWER_S)
    program, told = tmp_path / "hosts", list[str]()

    async def answers(*texts: str) -> list[list[HostSpec] | None]:
        one = Discovery(str(program), told.append)
        found = []
        for text in texts:
            program.write_text(text)
            program.chmod(0o755)
            found.append(await one.ask())
        return found

    good, nothing = "#!/bin/sh\necho a:2; echo; echo b", "#!/bin/sh\n"
    two = [HostSpec("a", 2), HostSpec("b")]
    assert asyncio.run(answers(nothing, good, nothing, good)) == [[], two, None, two]
    assert told == [f"--host-discovery {program} names no host any more; the hosts stay as they are"]
    told.clear()
    bad = [
        "#!/bin/sh\necho a; exit 3",
        "#!/bin/sh\necho a; exit 3",  # said once
        "#!/bin/sh\necho a; echo a:2",
        "#!/bin/sh\necho error: no route",
        "#!/bin/sh\nsleep 600",
        "#!/bin/sh\nsleep 600 & echo a",  # holds our pipe
        "#!/not/here\n",
    ]
    assert asyncio.run(answers(*bad)) == [None] * len(bad)
    said = ("ended with 3", "a is there twice", "line 1: 'error:'", f"no answer within {ANSWER_S:g} s", "No such file")
    for line, part in zip(told, said, strict=True):
        assert part in line
        assert line.endswith("; the hosts stay as they are")

"""`--event-log-handler console` beside torchrun: the same keys, and the same story."""

from __future__ import annotations

import json
from typing import Any

from tests.beside_torchrun.beside import SCRIPTS, Launchers, Side


def events(side: Side) -> list[dict[str, Any]]:
    assert side.code == 0, side
    return [json.loads(text) for text in side.err.splitlines() if text.startswith('{"name"')]


def place(event: dict[str, Any]) -> tuple[str, int]:
    return event["name"] + event["source"], event["metadata"]["global_rank"] or 0


def test_the_same_events_with_the_same_keys(launchers: Launchers) -> None:
    line = ["--standalone", "--nproc-per-node", "2", "--event-log-handler", "console", "--log-dir", "{logs}"]
    theirs, ours = map(events, launchers.pair(*line, str(SCRIPTS / "empty.py")))

    def story(told: list[dict[str, Any]]) -> list[tuple[str, str]]:
        return [(each["source"], each["name"]) for each in told]

    assert story(ours) == story(theirs)
    ours.sort(key=place)  # workers end in any order
    theirs.sort(key=place)
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine) == list(other)
        assert list(mine["metadata"]) == list(other["metadata"])
        assert list(json.loads(mine["metadata"]["metadata"])) == list(json.loads(other["metadata"]["metadata"]))
        for key in ("global_rank", "group_rank", "role", "state", "rdzv_backend", "agent_restarts"):
            assert mine["metadata"][key] == other["metadata"][key], key

"""Tells from the journals of a run what became of the copies of states in memory on other nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

COPIES_NEED = {
    "generation": {"generation", "world_size"},
    "snapshot_copy": {"step", "rank", "size_bytes", "why"},
    "snapshot_fetched": {"step", "took_s"},
}
"""Events about copies, and the fields that are read: events without them are left out."""


class ResumedData(TypedDict):
    """A generation that began from copies of other nodes."""

    generation: int
    step: int
    states: int
    """Number of states that were fetched."""
    slowest_s: float


class CopiesData(TypedDict):
    """What became of the copies of states in memory."""

    sent: int
    sent_bytes: int
    newest_step: int | None
    survivable_step: int | None
    """The step from which training would go on if a node were lost now; null: unknown, or none."""
    skipped_steps: int
    skipped_since: int
    """Steps without a copy since survivable_step."""
    failed: int
    last_failure: str
    resumed: list[ResumedData]


def copies_of(journals: Sequence[Sequence[dict[str, Any]]]) -> CopiesData | None:
    """The copies of states in memory on other nodes: sent, skipped, failed, and used; None: there were none."""
    journals = [
        [each for each in journal if COPIES_NEED.get(each["event"], {""}) <= each.keys()] for journal in journals
    ]
    copies = [each for journal in journals for each in journal if each["event"] == "snapshot_copy"]
    sent = [each for each in copies if not each["why"]]
    failed = [each for each in copies if each["why"] and each["rank"] >= 0]
    fetched = list(fetches(journals))
    if not copies and not fetched:
        return None
    safe_step, skipped_since = survivable_step(journals)
    return {
        "sent": len(sent),
        "sent_bytes": sum(each["size_bytes"] for each in sent),
        "newest_step": max((each["step"] for each in sent), default=None),
        "survivable_step": safe_step,
        "skipped_steps": sum(each["rank"] < 0 for each in copies),
        "skipped_since": skipped_since,
        "failed": len(failed),
        "last_failure": failed[-1]["why"] if failed else "",
        "resumed": fetched,
    }


def fetches(journals: Sequence[Sequence[dict[str, Any]]]) -> Iterator[ResumedData]:
    """The generations that began from states that were fetched from other nodes."""
    found: dict[tuple[int, int], list[float]] = {}
    for journal in journals:
        generation = 0
        for each in journal:
            if each["event"] == "generation":
                generation = each["generation"]
            elif each["event"] == "snapshot_fetched":
                found.setdefault((generation, each["step"]), []).append(each["took_s"])
    for (generation, step), took_s in sorted(found.items()):
        yield {"generation": generation, "step": step, "states": len(took_s), "slowest_s": max(took_s)}


def survivable_step(journals: Sequence[Sequence[dict[str, Any]]]) -> tuple[int | None, int]:
    """The newest step whose copies arrived for all ranks of the generation that runs now, and the number of steps that
    were skipped after it.

    The step is None if it is unknown, as at the generation's beginning. Its first copies need the journals of all
    nodes.
    """
    now: list[tuple[int, list[dict[str, Any]]]] = []
    newest = 0
    for journal in journals:
        begun = [number for number, each in enumerate(journal) if each["event"] == "generation"][-1:]
        for number in begun:
            at = journal[number]
            newest = max(newest, at["generation"])
            now.append((at["generation"], list(journal[number:])))
    arrived: dict[int, set[int]] = {}
    skipped: list[int] = []
    world, known = 0, set[int]()
    for events in (events for generation, events in now if generation == newest):
        world = events[0]["world_size"]
        copies = [each for each in events if each["event"] == "snapshot_copy"]
        own = {each["step"] for each in copies if not each["why"]}
        # An event names the newest step that all ranks have copied before. It may also be the state from which the
        # generation resumed, of which a node that has just joined need not have a copy: so it must be one of `own`.
        known |= own & {each.get("kept") for each in copies}
        skipped += [each["step"] for each in copies if each["rank"] < 0]
        for each in copies:
            if not each["why"]:
                arrived.setdefault(each["step"], set()).add(each["rank"])
    step = max([step for step, ranks in arrived.items() if step in known or len(ranks) == world], default=None)
    return step, sum(step is None or each > step for each in skipped)

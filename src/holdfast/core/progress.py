"""How far the ranks are, as their agents read it from the board; and the job as its coordinator sees it. Plain data."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from holdfast.core.bounds import Count, LocalRank, Seconds


class Stage(Enum):
    """How far a worker has come in its generation."""

    STARTING = "starting"
    """It imports, and sets up what the script sets up first."""
    MEETING = "meeting"
    """It asks for its process group, and is not connected to the store yet."""
    GROUPING = "grouping"
    """It is connected to the store, and the group does not stand yet."""
    READY = "ready"
    """The group stands, or it was never asked for; no step yet."""
    STEPPING = "stepping"
    """It has made a step, or a beat."""
    DONE = "done"
    """It has ended with 0."""


class Standing(Enum):
    """What a rank does in a hang that was reported."""

    HUNG = "hung"
    """The others wait for it."""
    WAITING = "waiting"
    STILL = "still"
    """Neither: it stays where it is."""


class RankProgress(Struct, frozen=True, array_like=True):
    """One worker of a generation that runs."""

    local_rank: LocalRank
    stage: Stage
    steps: Count = 0
    """Of an optimizer; `beat()`s where there are none."""
    age_s: Seconds = 0.0
    """Since the newest step or beat (before the first: since the worker was started), by its node's clock."""
    own_s: Seconds = 0.0
    """Of all its steps together: from the end of the step before to the beginning of backward. What others make it wait
    for is not in it."""
    beats: Count = 0
    """`beat()`s, also where an optimizer makes steps: an evaluation may have nothing else to show."""


class RankView(Struct, frozen=True, kw_only=True):
    rank: int
    local_rank: int
    stage: Stage
    steps: int
    step_s: float
    """Median duration of a step over the last minute; 0 while unknown."""
    own_s: float
    """The same of its own part, before backward."""
    age_s: float
    standing: Standing | None = None
    """None: no hang was reported, or it is over."""
    place: str = ""
    """With `standing`, where it is, in words."""


class NodeView(Struct, frozen=True, kw_only=True):
    member: str
    host: str
    group_rank: int | None
    """None: not in the world (spare, on probation, arriving)."""
    state: str
    """In words: `running`, `spare`, `starting`, `stopping` …"""
    heard_s: float
    """Since its last message, by the coordinator's clock."""
    ranks: tuple[RankView, ...] = ()


class JobView(Struct, frozen=True, kw_only=True):
    """What the coordinator knows, for people."""

    run_id: str
    phase: str
    generation: int
    restarts: int
    restarts_max: int
    world_size: int
    since_s: float
    """The phase has lasted so long."""
    job_s: float
    """The coordinator has lived so long."""
    training_s: float
    """Of that, how long some generation was running with steps being made: effective training time."""
    why: str = ""
    """Of the last end of a generation."""
    nodes: tuple[NodeView, ...] = ()
    notices: tuple[str, ...] = ()
    """Hangs and stragglers that stand now, in words."""

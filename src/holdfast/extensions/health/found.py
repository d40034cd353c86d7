"""What the checks of a preflight have found: an agent that gets it from a child needs none of their modules."""

from __future__ import annotations

from typing import NamedTuple


class FailedCheck(NamedTuple):
    """A check that did not pass."""

    text: str
    """Its code, its name and its result."""
    stops: bool
    """This node cannot train with it. A warning parks no node."""


class Preflight(NamedTuple):
    """The result of the checks of one node."""

    problems: tuple[FailedCheck, ...]
    traits: dict[str, str]
    """What is compared with the other nodes."""
    used_bytes: dict[int, int]
    """Bytes in use on each GPU that reports them, by its index."""
    seconds: float
    """The duration of the checks."""

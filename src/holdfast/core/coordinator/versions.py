"""Do the nodes of a job have the same software and script? Compared with the first node that came. Pure.

A difference is said once, whatever the number of nodes that share it, and stops nothing: it may be meant.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from holdfast.core.policy import NodeSpec

NODES_DIFFER = "HF307"
SCRIPT = "script"
ARGUMENTS = "arguments"
"""Keys whose values are hashes and no versions: together, what a node was told to run."""


class Difference(Struct, frozen=True):
    what: str
    text: str
    """For the console: both sides are named."""


class Versions:
    """What the first node has, and which differences were said."""

    def __init__(self) -> None:
        self.first: NodeSpec | None = None
        self._said: set[tuple[str, str]] = set()

    def compare(self, node: NodeSpec) -> list[Difference]:
        """What is new to say about this one."""
        if not node.versions:
            return []  # it could not look
        if self.first is None:
            self.first = node
            return []
        mine = self.first.versions
        found = []
        for what in sorted(mine.keys() | node.versions.keys()):
            theirs = node.versions.get(what, "")
            if theirs != mine.get(what, "") and (what, theirs) not in self._said:
                self._said.add((what, theirs))
                found.append(Difference(what, self._text(what, mine, node)))
        return found

    def other_line(self, node: NodeSpec) -> str:
        """What of this node's line is not the job's, in words; empty: nothing that is known."""
        if self.first is None or not node.versions:
            return ""
        mine, theirs = self.first.versions, node.versions
        return " and ".join(what for what in (SCRIPT, ARGUMENTS) if mine.get(what, "") != theirs.get(what, ""))

    def _text(self, what: str, mine: Mapping[str, str], node: NodeSpec) -> str:
        assert self.first is not None
        here, there = self.first.host, node.host
        if here == there:
            here, there = self.first.member, node.member
        if what == SCRIPT:
            return f"{NODES_DIFFER}: the script is not the same file on {here} and on {there}"
        if what == ARGUMENTS:
            return f"{NODES_DIFFER}: the script's arguments are not the same on {here} and on {there}"
        had, has = mine.get(what) or "not found", node.versions.get(what) or "not found"
        return f"{NODES_DIFFER}: {what} differs: {had} on {here}, {has} on {there}"

"""The question `save`: its subject and its time limit. The answer is `Sent`."""

from __future__ import annotations

from msgspec import Struct

SAVE_S = 12.0
"""Time for which a command waits for the answer (s): a safe point is agreed first."""


class About(Struct, frozen=True, forbid_unknown_fields=True):
    """The subject of the question. It is empty, because all ranks save."""

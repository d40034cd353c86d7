"""What `save` is asked about. The answer is `Sent`."""

from __future__ import annotations

from msgspec import Struct

SAVE_S = 12.0
"""A command waits this long for the answer, for which a safe point is agreed first."""


class About(Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing: all ranks save."""

"""What `stop` and `kill` are asked about. The answer is `Sent`."""

from __future__ import annotations

from msgspec import Struct


class About(Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing: the whole job ends."""

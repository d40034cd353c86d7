"""The subject of the questions `stop` and `kill`. The answer is `Sent`."""

from __future__ import annotations

from msgspec import Struct


class About(Struct, frozen=True, forbid_unknown_fields=True):
    """The subject of the question. It is empty, because the whole job ends."""

"""Between its halves, what it is asked about, and its answer."""

from __future__ import annotations

from msgspec import Struct


class About(Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing: all nodes are asked."""


class Say(Struct, frozen=True, array_like=True):
    number: int


class Said(Struct, frozen=True, array_like=True):
    number: int
    folder: str


class Folders(Struct, frozen=True):
    folders: dict[str, str]
    """By host."""

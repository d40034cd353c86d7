"""The subject of the questions `drain`, `exclude` and `readmit`. The answer is `Sent`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

HOST_CHARACTERS_MAX = 255


class About(Struct, frozen=True, forbid_unknown_fields=True):
    """The host that the question is about."""

    host: Annotated[str, Meta(max_length=HOST_CHARACTERS_MAX)]
    for_s: Annotated[float, Meta(ge=0)] = 0.0
    """Time for which the host is excluded (s); only for `exclude`."""

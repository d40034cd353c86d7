"""What `drain`, `exclude` and `readmit` are asked about. The answer is `Sent`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

HOST_CHARACTERS_MAX = 255


class About(Struct, frozen=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(max_length=HOST_CHARACTERS_MAX)]
    for_s: Annotated[float, Meta(ge=0)] = 0.0
    """`exclude`: how long."""

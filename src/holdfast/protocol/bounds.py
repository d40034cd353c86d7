"""Bounds of the numbers in messages. PURE.

The decoders of protocol.codec check every message against them. A number that no honest peer can send ends its sender's
connection and never reaches a machine. Bounds that depend on the job are checked in coordinator.admission.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

WORKERS_PER_NODE_MAX = 4096
RANKS_MAX = 2**31 - 1
LINE_MAX = 2**31 - 1
COUNT_MAX = 2**62
"""COUNT_MAX + 1 still fits into every message and into the 64 bits of a board's word."""
SECONDS_MAX = 1e12
EXIT_CODE_MAX = 2**32
ITEMS_MAX = 64
"""Limit of entries in a table or list of texts that a peer sends."""

Workers: TypeAlias = Annotated[int, Meta(ge=0, le=WORKERS_PER_NODE_MAX)]
LocalRank: TypeAlias = Annotated[int, Meta(ge=0, lt=WORKERS_PER_NODE_MAX)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=RANKS_MAX)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Line: TypeAlias = Annotated[int, Meta(ge=-1, le=LINE_MAX)]
"""Line of a source file; -1 or 0: none."""
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65_535)]
PortOrNone: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
"""Neither NaN nor infinite."""
Period: TypeAlias = Annotated[float, Meta(ge=0.001, le=SECONDS_MAX)]
"""Interval of something periodic."""
ExitCode: TypeAlias = Annotated[int, Meta(ge=-1024, le=EXIT_CODE_MAX)]
Words: TypeAlias = Annotated[dict[str, str], Meta(max_length=ITEMS_MAX)]

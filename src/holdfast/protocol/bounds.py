"""How large a number in a message may be. PURE.

The decoders of wire.codec hold every message against these: a number that no honest peer can send costs its sender the
connection, and never reaches a machine. What depends on the job is checked in core.coordinator.admission.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

WORKERS_PER_NODE_MAX = 4096
RANKS_MAX = 2**31 - 1
LINE_MAX = 2**31 - 1
COUNT_MAX = 2**62
"""One more still fits into every message and into the 64 bits of a worker's board."""
SECONDS_MAX = 1e12
EXIT_CODE_MAX = 2**32
ITEMS_MAX = 64
"""In a table or list of a peer's words."""

Workers: TypeAlias = Annotated[int, Meta(ge=0, le=WORKERS_PER_NODE_MAX)]
LocalRank: TypeAlias = Annotated[int, Meta(ge=0, lt=WORKERS_PER_NODE_MAX)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=RANKS_MAX)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Line: TypeAlias = Annotated[int, Meta(ge=-1, le=LINE_MAX)]
"""Of a source file; -1 or 0 where there is none."""
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65_535)]
PortOrNone: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
"""Neither NaN nor infinite."""
Period: TypeAlias = Annotated[float, Meta(ge=0.001, le=SECONDS_MAX)]
"""Of something that comes again and again."""
ExitCode: TypeAlias = Annotated[int, Meta(ge=-1024, le=EXIT_CODE_MAX)]
Words: TypeAlias = Annotated[dict[str, str], Meta(max_length=ITEMS_MAX)]

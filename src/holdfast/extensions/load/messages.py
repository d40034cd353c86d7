"""The load of one node, as it is sent, and as `status` shows it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from holdfast.protocol.policy import ITEMS_MAX, Count

SHOWN_MAX = 128
"""Number of nodes whose load is shown, by group rank; others do not send it. Views of large jobs are asked for once a
second."""


class GpuLoad(Struct, frozen=True):
    """Load of one GPU."""

    percent: Count
    used_bytes: Count
    total_bytes: Count
    celsius: Count
    index: Count = 0
    """Its number on the node: a GPU that cannot be read is left out."""


class NodeLoad(Struct, frozen=True):
    """Load of one node. Rates are means since the one before."""

    cores: Count
    cpu_percent: Count
    """Share of all cores together: 100 at most."""
    memory_bytes: Count
    """Memory in use: what programs could not get."""
    memory_total_bytes: Count
    disk_free_bytes: Count
    """Free bytes of the run folder's file system."""
    disk_total_bytes: Count
    """Size of that file system; 0: there is no run folder, or it cannot be read."""
    received_bytes_s: Count
    """Bytes that came in by all interfaces but loopback."""
    sent_bytes_s: Count
    lag_ms: Count = 0
    """Time that the agent took to come to an event."""
    gpus: Annotated[tuple[GpuLoad, ...], Meta(max_length=ITEMS_MAX)] = ()

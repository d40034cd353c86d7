"""The checks of `--preflight quick`, by a child that works while the agent imports its modules (runtime/ahead.py)."""

from __future__ import annotations

import asyncio
import socket

import msgspec

from holdfast.extensions.health.preflight import check_node
from holdfast.protocol.options import RunOptions


def work(options: RunOptions) -> bytes:
    """A `Preflight` of this node, encoded."""
    return msgspec.msgpack.encode(asyncio.run(check_node(options, socket.gethostname().partition(".")[0])))

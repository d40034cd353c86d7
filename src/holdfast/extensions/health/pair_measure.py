"""A node's part in the rounds of --preflight full: it answers the others, and sends to one other node in each round."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from msgspec import Struct

from holdfast.doctor.probe import KEY_BYTES, Peer, ProbeServer, probe
from holdfast.extensions.health.messages import ROUND_S, Measurable, MeasurePairs, PairPeer, PairsMeasured, PairsOver
from holdfast.protocol.messages import Assign
from holdfast.runtime.connection import numeric

TRANSFER_S = 0.2
"""Duration of one transfer."""
END_S = 0.1
"""Pause between the end of a transfer and the next round (s)."""
ADDRESSES = ("0.0.0.0", "::")
"""The node does not know the address to which the others come. Only who has the key is answered, and only meanwhile."""

Orders = asyncio.Queue[MeasurePairs | PairsOver]


async def take_part(assign: Assign, orders: Orders, send: Callable[[Struct], None], until_s: float) -> str:
    """Offer this node, and measure as ordered until it is over. Ends at `until_s` (monotonic). Returns the reason why
    nothing was measured to the end; empty: it was."""
    key, server = os.urandom(KEY_BYTES), ProbeServer()
    began = False
    try:
        async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
            await server.open(ADDRESSES[:1])
            with contextlib.suppress(OSError):  # a machine without IPv6
                await server.open(ADDRESSES[1:])
            send(Measurable(assign.generation, assign.group_world_size, server.port, key))
            while isinstance(order := await orders.get(), MeasurePairs):
                began = True
                server.introduce(order.me, key)
                send(PairsMeasured(order.generation, order.attempt, await measure(order)))
            return ""
    except TimeoutError:
        return "it took too long" if began else "not all nodes are ready for it: give --preflight full on all"
    except OSError as error:
        return error.strerror or str(error)
    finally:
        await server.close()


async def measure(order: MeasurePairs) -> dict[int, float]:
    """Bytes per second to each partner; 0: no connection, or nothing came back in time."""
    began_s = time.monotonic()
    rates: dict[int, float] = {}
    for number, partner in enumerate(order.partners):
        # No barrier: all have got their orders within a fraction of a round.
        await asyncio.sleep(max(0.0, began_s + number * ROUND_S - time.monotonic()))
        if partner is None or not _is_numeric(partner):
            continue
        rates[partner.index] = 0.0
        peer = Peer(name="", host="", address=partner.address, port=partner.port)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + ROUND_S - END_S):
                path = await probe(peer, partner.index, partner.key, transfer_s=TRANSFER_S)
                rates[partner.index] = path.bytes_s or 0.0
    return rates


def _is_numeric(partner: PairPeer) -> bool:
    """A name (--local-addr) is not looked up: that may take longer than a round, and its pairs are not judged then."""
    try:
        numeric(partner.address, partner.port)
    except OSError:
        return False
    return True

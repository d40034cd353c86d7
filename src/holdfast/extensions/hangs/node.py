"""Samples this node's workers for the detection of hangs, and tries to reach the generation's store. Judges nothing."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from holdfast.extensions.hangs.messages import Look, Looked
from holdfast.protocol.codec import send_samples
from holdfast.protocol.rank_progress import RankSample
from holdfast.runtime.node_extension import NodeExtension

REACH_S_MAX = 3.0
"""Limit for the test connection to the generation's store."""


class OnNode(NodeExtension):
    messages = Look

    def heard(self, message: Look) -> None:
        self.node.start("hangs", self._look(message))

    async def _look(self, look: Look) -> None:
        samples: tuple[RankSample, ...] = ()
        reach: tuple[str, ...] = ()
        running = self.node.workers(look.generation)
        if running is not None:  # else they have ended, or are of another generation
            store = running.master if look.store else None
            samples, reach = await asyncio.gather(self.node.samples(), self._reach(store))
        send_samples(self.send, partial(_looked, look, reach), samples)

    async def _reach(self, store: tuple[str, int] | None) -> tuple[str, ...]:
        """The problems with the connection to this store, in words."""
        if store is None:
            return ()
        address, port = store
        try:
            async with asyncio.timeout(REACH_S_MAX):
                _, writer = await asyncio.open_connection(address, port)
        except TimeoutError:
            problem = "timed out"
        except socket.gaierror as error:
            problem = f"the name is not known here ({error.strerror})"
        except UnicodeError:
            problem = "that is no name of a host"
        except OSError as error:
            problem = (
                "connection refused" if isinstance(error, ConnectionRefusedError) else str(error.strerror or error)
            )
        else:
            writer.close()
            return ()
        return (f"{self.node.host} cannot reach {address}:{port}: {problem}",)


def _looked(look: Look, reach: tuple[str, ...], samples: tuple[RankSample, ...]) -> Looked:
    return Looked(look.generation, look.number, samples, reach)

"""Gives the workers a folder for compiled kernels that outlives them (--cache-dir), and bounds its size at the end.
With --cache-from an empty one begins with a copy of a folder that nodes share, and a job that ends well adds to it.

torch.compile, Triton, CUDA and torch's C++ extensions each keep theirs elsewhere, some in a home folder of another
machine. A folder that others could write into ends the start. Shared storage that does not answer does not: the kernels
are compiled here then.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from holdfast.compile_caches import BYTES_MAX, COPY_BYTES_MAX, COPY_S_MAX, CacheFolder, CacheSize, variables
from holdfast.detached import run_detached
from holdfast.protocol.errors import CacheDirError
from holdfast.protocol.messages import Assign
from holdfast.protocol.outcome import Outcome, OutcomeKind
from holdfast.runtime.node_extension import (
    Node,
    NodeExtension,
    NodeHappened,
    Send,
    WorkersGone,
    WorkersRegrouped,
    WorkersStarted,
)

if TYPE_CHECKING:
    from holdfast.extensions.caches.shared_folder import Copied, SharedFolder

BOUND_S_MAX = 3.0
"""Limit of the time for which the end of the job waits until the size is bounded (s)."""
OPEN_S_MAX = 5.0
"""Limit of the time for which the start waits for the shared folder (s)."""
SLACK_S = 1.0
"""Time beyond COPY_S_MAX after which the storage does not answer (s): a copy looks at the clock between two calls."""
TORN_S = 30.0
"""Time before the end of workers in which a file may have been written that they have not completed (s)."""


class OnNode(NodeExtension):
    def __init__(
        self,
        node: Node,
        send: Send,
        bytes_max: int = BYTES_MAX,
        copy_bytes_max: int = COPY_BYTES_MAX,
        copy_s_max: float = COPY_S_MAX,
    ) -> None:
        """Raises CacheDirError if the node's folder cannot be used."""
        super().__init__(node, send)
        self._bytes_max = bytes_max
        self._copy_bytes_max = copy_bytes_max
        self._copy_s_max = copy_s_max
        self._folder: CacheFolder | None = None
        self._shared: SharedFolder | None = None
        self._variables: Mapping[str, str] = {}
        self._seeding: asyncio.Task[None] | None = None
        self._seeded = threading.Event()
        """The copy at the start is to end, if it is under way."""
        self._began_s = time.time()
        self._gone_s: list[float] = []
        """The times at which workers here were gone, as the file system counts."""
        self._run = False
        """Workers run here, or were the last to run here: `_gone_s` does not have their end."""
        self._writes = False
        """This node has the first rank: it is the one that adds to the shared folder."""
        path = node.options.cache_dir
        if path is None:
            return
        try:
            self._folder = CacheFolder(path)
        except OSError as error:
            raise _unusable("--cache-dir", path, error) from error
        self._variables = variables(path, os.environ)
        node.write("caches", folder=path, had_entries=self._folder.had_entries, variables=list(self._variables))

    async def begin(self) -> None:
        """Raises CacheDirError if the shared folder cannot be used."""
        folder, path = self._folder, self.node.options.cache_from
        if folder is None or path is None:
            return
        from holdfast.extensions.caches.shared_folder import SharedFolder  # few jobs need it

        try:
            async with asyncio.timeout(OPEN_S_MAX):
                self._shared = await run_detached(lambda: SharedFolder(path))
        except TimeoutError:
            self.node.write("caches_seeded", **self._nothing_copied(f"no answer within {OPEN_S_MAX:g} s"))
        except OSError as error:
            self._folder = None
            folder.close()
            raise _unusable("--cache-from", path, error) from error
        else:
            self._seeding = asyncio.create_task(self._seed(folder, self._shared))

    async def _seed(self, folder: CacheFolder, shared: SharedFolder) -> None:
        bytes_max = self._copy_bytes_max
        try:
            found = await self._copied(self._seeded, lambda over: shared.seed(folder, bytes_max, over))
            self.node.write("caches_seeded", **found)
        except Exception as error:  # noqa: BLE001 - workers must not wait for a fault of ours
            self.node.fault("caches", error)

    async def _copied(
        self, ended: threading.Event, copy: Callable[[Callable[[], bool]], Copied | None]
    ) -> dict[str, object]:
        """Copy within the limit of time. Returns what the journal gets about it."""
        began_s = time.monotonic()
        until_s = began_s + self._copy_s_max

        def over() -> bool:
            return ended.is_set() or time.monotonic() >= until_s

        try:
            async with asyncio.timeout(self._copy_s_max + SLACK_S):
                found = await run_detached(lambda: copy(over))
        except TimeoutError:
            return self._nothing_copied(f"no answer within {self._copy_s_max + SLACK_S:g} s")
        except OSError as error:
            return self._nothing_copied(error.strerror or str(error))
        folder = self.node.options.cache_from
        if found is None:
            return {"folder": folder, "error": "another job uses the node's folder"}
        seconds = round(time.monotonic() - began_s, 3)
        return {
            "folder": folder,
            "files": found.files,
            "bytes": found.bytes,
            "whole": found.whole,
            "seconds": seconds,
        }

    def _nothing_copied(self, why: str) -> dict[str, object]:
        path = self.node.options.cache_from
        self.node.say(f"--cache-from {path}: compiled kernels are not copied: {why}")
        return {"folder": path, "error": why}

    async def unfit(self, assign: Assign) -> str:  # noqa: ARG002
        # Workers that compile before the copy is there would do it for nothing. It began with the agent, and has a
        # limit of its own; a formation that is given up must not end it.
        if self._seeding is not None:
            await asyncio.wait([self._seeding])
        return ""

    def happened(self, event: NodeHappened) -> None:
        match event:
            case WorkersStarted(assign) | WorkersRegrouped(assign):
                self._run = True
                self._writes = assign.group_rank == 0
            case WorkersGone() if self._run:
                self._run = False
                self._gone_s.append(time.time())
            case _:
                pass

    def environment(self, generation: int, local_rank: int) -> Mapping[str, str]:  # noqa: ARG002
        return self._variables

    async def close(self, outcome: Outcome | None) -> None:
        folder, self._folder = self._folder, None
        if folder is None:
            return
        self._seeded.set()
        if self._seeding is not None:
            await asyncio.wait([self._seeding], timeout=BOUND_S_MAX)
        # After a fault of ours workers may still be alive, and use it.
        if outcome is None:
            folder.close()
            return
        try:
            await self._bound(folder)
            if self._shared is not None and self._writes and outcome.kind is OutcomeKind.SUCCEEDED:
                await self._add(folder, self._shared)
        finally:
            folder.close()

    async def _add(self, folder: CacheFolder, shared: SharedFolder) -> None:
        bytes_max = self._copy_bytes_max
        found = await self._copied(threading.Event(), lambda over: shared.add(folder, self._whole, bytes_max, over))
        self.node.write("caches_shared", **found)

    def _whole(self, written_s: float) -> bool:
        """Whether a file that was written at this time was completed, and here: workers that were ended may have left a
        part of one. The last workers have ended by themselves."""
        ends = self._gone_s if self._run else self._gone_s[:-1]
        return written_s >= self._began_s - 1 and not any(end - TORN_S <= written_s <= end + 1 for end in ends)

    async def _bound(self, folder: CacheFolder) -> None:
        def bound() -> CacheSize | None:
            until_s = time.monotonic() + BOUND_S_MAX
            return folder.bound(self._bytes_max, lambda: time.monotonic() >= until_s)

        try:
            async with asyncio.timeout(BOUND_S_MAX + SLACK_S):  # one call may wait for a file server that is gone
                found = await run_detached(bound)
        except TimeoutError:
            why = f"no answer within {BOUND_S_MAX + SLACK_S:g} s"
            self.node.write("caches_bounded", folder=folder.path, error=why)
            return
        except OSError as error:
            self.node.write("caches_bounded", folder=folder.path, error=error.strerror or str(error))
            return
        if found is None:
            self.node.write("caches_bounded", folder=folder.path, error="another job uses it")
        else:
            about = {"bytes": found.bytes, "removed_bytes": found.removed_bytes, "whole": found.whole}
            self.node.write("caches_bounded", folder=folder.path, **about)


def _unusable(option: str, path: str, error: OSError) -> CacheDirError:
    # Workers must not go on with it: what is in a folder of others would be executed.
    return CacheDirError(f"{option} {path} cannot be used: {error.strerror or error}")

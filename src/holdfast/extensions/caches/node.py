"""Gives the workers a folder for compiled kernels that outlives them (--cache-dir), and bounds its size at the end.

torch.compile, Triton, CUDA and torch's C++ extensions each keep theirs elsewhere, some in a home folder of another
machine. A folder that cannot be used ends the start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from holdfast.compile_caches import BYTES_MAX, CacheFolder, CacheSize, variables
from holdfast.detached import run_detached
from holdfast.protocol.errors import CacheDirError
from holdfast.protocol.outcome import Outcome
from holdfast.runtime.node_extension import Node, NodeExtension, Send

BOUND_S_MAX = 3.0
"""Limit of the time for which the end of the job waits until the size is bounded (s)."""


class OnNode(NodeExtension):
    def __init__(self, node: Node, send: Send, bytes_max: int = BYTES_MAX) -> None:
        """Raises CacheDirError if the folder cannot be used."""
        super().__init__(node, send)
        self._bytes_max = bytes_max
        self._folder: CacheFolder | None = None
        self._variables: Mapping[str, str] = {}
        path = node.options.cache_dir
        if path is None:
            return
        try:
            self._folder = CacheFolder(path)
        except OSError as error:
            why = error.strerror if isinstance(error, PermissionError) else str(error.strerror or error)
            # Workers must not go on with it: what is in a folder of others would be executed.
            raise CacheDirError(f"--cache-dir {path} cannot be used: {why}") from error
        self._variables = variables(path, os.environ)
        node.write("caches", folder=path, had_entries=self._folder.had_entries, variables=list(self._variables))

    def environment(self, generation: int, local_rank: int) -> Mapping[str, str]:  # noqa: ARG002
        return self._variables

    async def close(self, outcome: Outcome | None) -> None:
        folder, self._folder = self._folder, None
        if folder is None:
            return
        # After a fault of ours workers may still be alive, and use it.
        if outcome is None:
            folder.close()
            return

        def bound() -> CacheSize | None:
            until_s = time.monotonic() + BOUND_S_MAX
            try:
                return folder.bound(self._bytes_max, lambda: time.monotonic() >= until_s)
            finally:
                folder.close()

        try:
            found = await run_detached(bound)
        except OSError as error:
            self.node.write("caches_bounded", folder=folder.path, error=error.strerror or str(error))
            return
        if found is None:
            self.node.write("caches_bounded", folder=folder.path, error="another job uses it")
        else:
            about = {"bytes": found.bytes, "removed_bytes": found.removed_bytes, "whole": found.whole}
            self.node.write("caches_bounded", folder=folder.path, **about)

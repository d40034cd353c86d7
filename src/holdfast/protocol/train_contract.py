"""The contract between the launcher and `holdfast.train`: variables, options of `ht.survive`, and the programs of
train that the launcher starts. PURE, standard library only.

Neither side imports the other: train runs in the worker, under the user's Python, and the launcher starts what it needs
of it by path. Both know in addition the errors (errors.py), the board with its channel (board_layout.py), and the
shared-memory folder (memory_folder.py).

The agent and the saver exchange messages as in seqpacket.py:

    agent → saver    {"do": "finish"}                                 end when nothing is in flight any more
                     {"do": "prefetch", "states"}                     fetch these before the workers ask for them
    saver → agent    {"is": "up"}                                     it listens
                     {"is": "news", "text"}                           for the user
                     {"is": "saved", "path", "step", "took_s"}        it is committed; perhaps "stall_s", "metrics"
                     {"is": "copy", "step", "rank", "to", "size_bytes", "took_s", "why", "kept"}   to another node
                     {"is": "fetched", "step", "rank", "of", "took_s"}                             from another node
                                                                      perhaps "ahead": before a worker asked for it
                     {"is": "serving", "port", "host", "word", "folder", "rank", "world"}      it exchanges copies

Those of the channel of `ht.survive` are in supervisor/channel.py.
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path

# --- ht.survive -------------------------------------------------------------------------------------------------------


class Survive(Enum):
    """The reaction of the other workers when one is lost (--survive), if they run in `ht.survive`."""

    SHRINK = "shrink"
    """They go on with fewer ranks, and a replacement joins when it is ready."""
    WAIT = "wait"
    """They keep their state and wait for the replacement."""
    OFF = "off"
    """All workers are stopped and started again."""


RUN_ID_VARIABLE = "HOLDFAST_RUN_ID"
"""One id of the training for loggers. An agent's own goes to its workers; a snapshot's replaces it."""
SURVIVE_VARIABLE = "HOLDFAST_SURVIVE"
"""The variable of --survive, also in workers: `ht.survive` says what it means, and checks that it can."""
REPLACEMENT_VARIABLE = "HOLDFAST_REPLACEMENT"
"""Variable of a worker that is started while the others run: it gets its place when it is ready."""
WHY_CHARACTERS_MAX = 4096
"""Limit of the reason why a worker cannot go on (characters)."""


# --- programs of train ------------------------------------------------------------------------------------------------

_PACKAGE = Path(__file__).resolve().parents[1]

STORE_SERVER = str(_PACKAGE / "train" / "store_server.py")
"""The program that serves the TCPStores of one node. Its argument is the descriptor of its socket to the agent."""
CHECKUP = str(_PACKAGE / "train" / "checkup.py")
GPU_CHECKUP = str(_PACKAGE / "train" / "gpu_checkup.py")
"""The program that answers the doctor's questions to torch."""

SAVER_VARIABLE = "HOLDFAST_SAVER"
"""Variable of a worker: `MEMORY_FOLDER@GENERATION@LOCAL_RANK`, the place of its slots and its saver."""
FINISH_LIMIT_S = 120.0
"""Limit for saves in flight at the agent's end (s). A save that is not done then is an uncommitted attempt."""
_SAVER = (
    "import os, sys; sys.argv[3] == '-1' and os.fork() and os._exit(0); sys.path.insert(0, {root!r}); "
    "from holdfast.train.snapshots.saver import main; main()"
)


def saver_argv(folder: Path, *, listening: int, control: int = -1, anchor: int = 0) -> list[str]:
    """The saver's command line: `listening` is a descriptor's number in it, and so is `control`, the agent's socket.

    Without an agent, `anchor` is the process after whose end the saver ends. The worker that starts it waits only until
    it is no child of its own: the imports take 0.1 s and more.
    """
    # Only our package is on its path: no site-packages, no PYTHONPATH, no folder of the user.
    root = str(_PACKAGE.parent)
    return [
        sys.executable,
        *("-I", "-S", "-c", _SAVER.format(root=root)),
        *(str(folder), str(listening), str(control), str(anchor)),
    ]

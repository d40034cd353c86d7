"""torch imports our entry point at every start of torchrun, whatever backend is asked for: it must be cheap and never fail."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytestmark = pytest.mark.xdist_group("torch jobs")

MEASURE = """
import sys
before = set(sys.modules)
import holdfast.torchrun_handler
creator = holdfast.torchrun_handler.handler_creator()
print(*sorted(set(sys.modules) - before))
"""


def run(program: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_registered_with_torch() -> None:
    (entry,) = entry_points(group="torchrun.handlers", name="holdfast")
    assert entry.value == "holdfast.torchrun_handler:handler_creator"


def test_the_import_is_cheap() -> None:
    """What it costs is what it imports: the rest of holdfast is loaded by whoever asks for our backend."""
    assert set(run(MEASURE).split()) <= {"holdfast", "holdfast.version", "holdfast.torchrun_handler", "__future__"}


def test_a_broken_environment_breaks_nobody_else() -> None:
    """Without msgspec, say: other backends are there as ever, and ours says what is missing when it is asked for."""
    said = run(
        "import sys, warnings, logging\n"
        "sys.modules['msgspec'] = None\n"
        "from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry\n"
        "import torch.distributed.elastic.rendezvous.registry as registry\n"
        "registry._register_default_handlers(); registry._register_out_of_tree_handlers()\n"
        "params = dict(endpoint='127.0.0.1:1', run_id='x', min_nodes=1, max_nodes=1)\n"
        "registry.get_rendezvous_handler(RendezvousParameters('static', **params, rank=0))\n"
        "try:\n"
        "    registry.get_rendezvous_handler(RendezvousParameters('holdfast', **params))\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert "msgspec" in said


def test_a_handler_that_torch_makes(free_port) -> None:
    said = run(
        "from torch.distributed.elastic.rendezvous import RendezvousParameters\n"
        "import torch.distributed.elastic.rendezvous.registry as registry, threading\n"
        "params = RendezvousParameters('holdfast', '127.0.0.1:0', 'x', 1, 1, timeout=900)\n"
        "handler = registry.get_rendezvous_handler(params)\n"
        "info = handler.next_rendezvous()\n"
        "info.store.set('k', 'v')\n"
        "place = info.bootstrap_store_info\n"
        "assert (info.rank, info.world_size, place.master_addr) == (0, 1, '127.0.0.1'), vars(info)\n"
        "assert handler.use_agent_store and handler.get_run_id() == 'x' and handler.num_nodes_waiting() == 0\n"
        "again = handler.next_rendezvous()\n"
        "assert again.bootstrap_store_info.master_port != place.master_port\n"
        "assert not again.store.check(['k'])\n"
        "assert not handler.is_closed()\n"
        "assert handler.shutdown() and handler.is_closed()\n"
        "assert threading.active_count() == 1\n"
        "try:\n"
        "    handler.next_rendezvous()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert said.startswith("RendezvousClosedError holdfast: the job is over, it has succeeded")

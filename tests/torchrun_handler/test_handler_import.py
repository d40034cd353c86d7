"""torch imports our entry point at every start of torchrun, whatever backend is asked for: it must be cheap and never fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.support.limits import limit_s
from tests.warm import Warm

pytestmark = pytest.mark.xdist_group("torch examples")  # one warm process for all

MEASURE = """
import sys
before = set(sys.modules)
import holdfast.torchrun_handler
creator = holdfast.torchrun_handler.handler_creator()
print(*sorted(set(sys.modules) - before))
"""


def test_registered_with_torch() -> None:
    (entry,) = entry_points(group="torchrun.handlers", name="holdfast")
    assert entry.value == "holdfast.torchrun_handler:handler_creator"


def test_the_import_is_cheap() -> None:
    """What it costs is what it imports: the rest of holdfast is loaded by whoever asks for our backend."""
    line = [sys.executable, "-c", MEASURE]
    done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s(30), check=True)
    assert set(done.stdout.split()) <= {"holdfast", "holdfast.version", "holdfast.torchrun_handler", "__future__"}


def run(warm: Warm, folder: Path, program: str) -> str:
    """What it prints. It finds torch imported."""
    (folder / "program.py").write_text(program)
    done = warm.run([folder / "program.py"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_broken_environment_breaks_nobody_else(warm: Warm, tmp_path: Path) -> None:
    """Without msgspec, say: other backends are there as ever, and ours says what is missing when it is asked for."""
    said = run(
        warm,
        tmp_path,
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
        "    print(error)\n",
    )
    assert "msgspec" in said


def test_a_handler_that_torch_makes(warm: Warm, tmp_path: Path) -> None:
    said = run(
        warm,
        tmp_path,
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
        "def _shutdown():  # of torch 2.6's agent, before its torchrun knows how the workers ended\n"
        "    handler.shutdown()\n"
        "_shutdown()\n"
        "assert not handler.is_closed()\n"
        "assert handler.shutdown() and handler.is_closed()\n"
        "assert threading.active_count() == 1\n"
        "try:\n"
        "    handler.next_rendezvous()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n",
    )
    assert said.startswith("RendezvousClosedError holdfast: the job is over, it has succeeded")


def test_nobody_at_the_endpoint(warm: Warm, tmp_path: Path, free_port: Callable[[], int]) -> None:
    said = run(
        warm,
        tmp_path,
        "from torch.distributed.elastic.rendezvous import RendezvousParameters\n"
        "import torch.distributed.elastic.rendezvous.registry as registry\n"
        f"endpoint = '127.0.0.1:{free_port()}'\n"
        "params = RendezvousParameters('holdfast', endpoint, 'x', 2, 2, join_timeout=1, is_host=0)\n"
        "try:\n"
        "    registry.get_rendezvous_handler(params).next_rendezvous()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n",
    )
    assert said.startswith("RendezvousConnectionError holdfast: HF302: no coordinator at")
    assert "connection refused (tried for 1 s)" in said


def test_the_time_for_the_store_begins_when_the_generation_is_formed(warm: Warm, tmp_path: Path) -> None:
    """The wait for another node may be longer than that, and the first try may fail."""
    said = run(
        warm,
        tmp_path,
        "import types\n"
        "import holdfast.torchrun_handler.handler as module\n"
        "from holdfast.torchrun_handler.member import FormedGeneration\n"
        "now, tries = 0.0, 0\n"
        "class Membership:\n"
        "    regroup = False\n"
        "    def next(self):\n"
        "        global now\n"
        "        now += 10 * module.CONNECT_S_MAX\n"
        "        return FormedGeneration(1, 1, 2, '127.0.0.1', 1, None)\n"
        "def store(*_, **__):\n"
        "    global now, tries\n"
        "    now, tries = now + module.CONNECT_S, tries + 1\n"
        "    raise module.DistError('The client socket has timed out')\n"
        "module.time, module.TCPStore = types.SimpleNamespace(monotonic=lambda: now), store\n"
        "handler = module.HoldfastRendezvous.__new__(module.HoldfastRendezvous)\n"
        "handler._membership = Membership()\n"
        "try:\n"
        "    handler.next_rendezvous()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, tries == module.CONNECT_S_MAX // module.CONNECT_S)\n",
    )
    assert said == "RendezvousConnectionError True\n"

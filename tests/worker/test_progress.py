"""What a worker's board shows of its start and of its steps, forked and executed, and that nothing is in its way."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.protocol import board_layout as layout
from holdfast.supervisor.board import Board, Phases
from holdfast.supervisor.worker_command import BOOTSTRAP
from tests.support.limits import limit_s
from tests.warm import Warm

pytestmark = pytest.mark.xdist_group("torch examples")  # one warm process for all

SCRIPTS = Path(__file__).parent.parent / "processes" / "scripts"
TRAINS = f"""
    import os, sys
    sys.path.append({str(SCRIPTS)!r})
    import torch, torch.distributed as dist, without_compiler
    dist.init_process_group("gloo")
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for _ in range(7):
        opt.step()
    if os.fork() == 0:
        opt.step()  # a child's own affair
        os._exit(0)
    os.wait()
    dist.barrier()
    dist.destroy_process_group()
    from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
    print(len(hooks), *[type(each).__name__ for each in sys.meta_path])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != os.environ["TORCHELASTIC_MAX_RESTARTS"]:
        sys.exit(3)
"""
MARKS = (layout.MEETING, layout.STORE, layout.GROUP, layout.FIRST_STEP, layout.STEPS)
LIMIT_S = 100
HOOKS = "from torch.optim.optimizer import _global_optimizer_post_hooks as hooks\n"
"""What is hooked to steps. To ask costs half as much as to make a step: an optimizer imports torch's compiler."""


@pytest.fixture
def board() -> Any:
    made = Board(1)
    yield made
    made.close()


def run(board: Board, folder: Path, source: str, warm: Warm | None = None, **environ: str) -> str:
    """A program that is executed and imports torch itself, or is forked from where it has been imported."""
    script = folder / "program.py"
    script.write_text(source)
    line = [BOOTSTRAP, "script", str(script)]
    env = {"PATH": "/usr/bin:/bin", layout.BOARD_VARIABLE: board.address(0), **environ}
    if warm is not None:
        done = warm.run(line, env=env, timeout=LIMIT_S)
    else:
        done = subprocess.run(
            [sys.executable, *line], env=env, capture_output=True, text=True, timeout=limit_s(LIMIT_S)
        )
    assert done.returncode == 0, done.stderr
    assert "Dynamo does not know" not in done.stderr
    return done.stdout


def words(board: Board) -> list[int]:
    return [board._words[layout.slot(0) + mark] for mark in MARKS]


def test_a_program_without_torch_marks_nothing(board: Board, tmp_path: Path) -> None:
    assert run(board, tmp_path, "import sys\nprint('mmap' in sys.modules)") == "False\n"
    assert words(board) == [0] * len(MARKS)


def test_steps_are_counted_without_a_process_group(warm: Warm, board: Board, tmp_path: Path) -> None:
    run(
        board,
        tmp_path,
        "import torch\nopt = torch.optim.SGD([torch.zeros(1, requires_grad=True)])\nopt.step()\nopt.step()",
        warm,
    )
    meeting, store, group, first, steps = words(board)
    assert (meeting, store, group) == (0, 0, 0)
    assert steps == 2
    assert board.moment(layout.FIRST_STEP) == first / 1e9


def test_a_group_that_failed_is_none(warm: Warm, board: Board, tmp_path: Path) -> None:
    source = (
        "import datetime, torch.distributed as dist\ntry:\n"
        "    dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=0.2))\nexcept Exception as e: print('failed')"
    )
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}
    assert run(board, tmp_path, source, warm, **env) == "failed\n"
    assert [word > 0 for word in words(board)] == [True, False, False, False, False]


def test_a_group_that_failed_after_its_store_is_none(
    warm: Warm, board: Board, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """The exception is dropped, and with it the rendezvous."""
    port = free_port()
    source = f"""
import datetime, torch.distributed as dist
served = dist.TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)
try:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=0.2))
except Exception: print("failed")
"""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}
    assert run(board, tmp_path, source, warm, TORCHELASTIC_USE_AGENT_STORE="True", **env) == "failed\n"
    assert [word > 0 for word in words(board)] == [True, True, False, False, False]
    assert not board.in_group(0)


def test_a_program_that_asks_for_the_store_by_itself_has_no_group_before_it_makes_one(
    warm: Warm, board: Board, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    source = """
import torch.distributed as dist
from holdfast.protocol import board_layout as layout
from holdfast.worker import drain
store, rank, world = next(dist.rendezvous("env://"))
words = drain._words_of(__import__("os").environ["HOLDFAST_BOARD"].partition("@")[0])
print(words[layout.slot(0) + layout.GROUP])
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
print(words[layout.slot(0) + layout.GROUP] > words[layout.slot(0) + layout.STORE] > 0)
"""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    assert run(board, tmp_path, source, warm, **env) == "0\nTrue\n"


def test_a_compiled_step_has_nothing_of_ours_in_its_graph(warm: Warm, board: Board, tmp_path: Path) -> None:
    source = """
import torch
weight = torch.zeros(1, requires_grad=True)
opt = torch.optim.SGD([weight], lr=0.1)
@torch.compile(backend="eager")
def step():
    opt.step()
weight.sum().backward()
step()
print(float(weight))
"""
    assert run(board, tmp_path, source, warm).startswith("-0.1")
    assert words(board)[-1] == 0, "and it is not counted, as the docs say"


def own_s(board: Board) -> float:
    return board.progress(0)[0].own_s


OWN = """
import sys, time, torch
weight = torch.zeros(4, requires_grad=True)
opt = torch.optim.SGD([weight], lr=0.1)
def loss(): return weight.sum()
"""


def test_own_time_ends_where_backward_begins(warm: Warm, board: Board, tmp_path: Path) -> None:
    source = """
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.3)  # as somebody who waits for others
        return grad
time.sleep(0.5)  # before the first step: start-up
opt.step()
since = time.monotonic()
for _ in range(2):  # gradients are accumulated
    time.sleep(0.1)
    Slow.apply(weight).sum().backward()
opt.step()
opt.step()
print(time.monotonic() - since)
"""
    steps_s = float(run(board, tmp_path, OWN + source, warm))
    assert 0.2 <= own_s(board) < steps_s - 0.3, "without what was waited for in backward"
    assert words(board)[-1] == 3


def test_a_backward_inside_of_a_backward(warm: Warm, board: Board, tmp_path: Path) -> None:
    source = """
from torch.utils.checkpoint import checkpoint
def slow(x):
    time.sleep(0.3)
    return x * 2
since = time.monotonic()
opt.step()
checkpoint(slow, weight, use_reentrant=True).sum().backward()
opt.step()
print(time.monotonic() - since)
"""
    step_s = float(run(board, tmp_path, OWN + source, warm))
    assert 0.3 <= own_s(board) <= step_s - 0.3, "what is computed again in backward is part of it"


def test_backward_is_as_it_was(warm: Warm, board: Board, tmp_path: Path) -> None:
    source = """
import inspect, pickle, torch.autograd
backward = torch.autograd.backward
print(backward.__name__, backward.__module__, backward.__doc__[:7], list(inspect.signature(backward).parameters)[:2])
assert pickle.loads(pickle.dumps(backward)) is backward
opt.step()
try:
    weight.backward()
except RuntimeError as error:
    print(str(error)[:22])
torch.autograd.backward([loss()], grad_tensors=[None], inputs=[weight])
loss().backward(retain_graph=True, inputs=[weight])
print(weight.grad.tolist())
opt.step()
"""
    told = "backward torch.autograd Compute ['tensors', 'grad_tensors']\ngrad can be implicitly\n[2.0, 2.0, 2.0, 2.0]\n"
    assert run(board, tmp_path, OWN + source, warm) == told
    assert own_s(board) > 0


def test_a_torch_whose_backward_is_another(board: Board, tmp_path: Path) -> None:
    folder = tmp_path / "torch" / "autograd"
    folder.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("def backward(tensors, more): return more\n")
    assert run(
        board, tmp_path, "import torch.autograd as a\nprint(a.backward(1, 2), a.backward.__code__.co_filename)"
    ).startswith(f"2 {tmp_path}")


def test_a_compiled_function_with_a_backward(warm: Warm, board: Board, tmp_path: Path) -> None:
    source = """
@torch.compile(backend="eager")
def train():
    (weight * 2).sum().backward()
for _ in range(3):
    train()
    opt.step()
print(weight.grad.tolist(), weight.tolist()[0] < 0)
"""
    assert run(board, tmp_path, OWN + source, warm) == "[6.0, 6.0, 6.0, 6.0] True\n"


def test_an_agent_that_is_gone_matters_to_nobody(warm: Warm, tmp_path: Path) -> None:
    board = Board(1)
    address = board.address(0)
    board.close()
    script = tmp_path / "program.py"
    script.write_text(f"import torch\n{HOOKS}print(len(hooks), torch.autograd.backward.__closure__)")
    env = {"PATH": "/bin", layout.BOARD_VARIABLE: address}
    done = warm.run([BOOTSTRAP, "script", script], env=env, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 None\n", "")


PRETENDED = """
import torch
hooks = []
register_optimizer_step_post_hook = hooks.append
"""


PRETENDED_BACKWARD = """
def backward(tensors, grad_tensors=None, retain_graph=None, create_graph=False, grad_variables=None, inputs=None):
    tensors()
"""


def pretend_torch(folder: Path, torch: str) -> None:
    """A torch whose optimizers have nothing but hooks."""
    package = folder / "torch" / "optim"
    package.mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(torch)
    (package / "__init__.py").write_text("")
    (package / "optimizer.py").write_text(PRETENDED)


COMPILES_NOTHING = "class compiler:\n    is_compiling = staticmethod(lambda: False)\n"


def test_a_child_that_imports_torch_first_counts_nothing(board: Board, tmp_path: Path) -> None:
    pretend_torch(tmp_path, COMPILES_NOTHING)
    source = """
import os
if os.fork() == 0:
    from torch.optim.optimizer import hooks
    os._exit(len(hooks))
print(os.wait()[1])
"""
    assert run(board, tmp_path, source) == "0\n"
    assert words(board) == [0] * len(MARKS)


def test_a_backward_of_another_thread_adds_no_time_since_the_start_of_the_machine(board: Board, tmp_path: Path) -> None:
    pretend_torch(tmp_path, COMPILES_NOTHING)
    (tmp_path / "torch" / "autograd.py").write_text(PRETENDED_BACKWARD)
    source = """
import threading, time
now_ns, began_ns, entered, leave, turns = time.monotonic_ns, time.monotonic_ns(), threading.Event(), threading.Event(), []
def turn_of_the_other():
    if turns:
        turns.pop()()
    return now_ns()
time.monotonic_ns = turn_of_the_other
import torch.autograd
from torch.optim.optimizer import hooks
(step_is_done,) = hooks
step_is_done()
def wait():
    entered.set()
    leave.wait()
other = threading.Thread(target=torch.autograd.backward, args=(wait,))
turns.append(lambda: (other.start(), entered.wait()))
torch.autograd.backward(int)
leave.set()
other.join()
step_is_done()
print(now_ns() - began_ns)
"""
    lived_ns = int(run(board, tmp_path, source))
    assert own_s(board) <= 2 * lived_ns / 1e9, "as much as both threads have lived"


def test_finders_that_have_something_around_them(board: Board, tmp_path: Path) -> None:
    pretend_torch(tmp_path, COMPILES_NOTHING)
    source = """
import sys
class Around:
    def __init__(self, finder):
        self.find_spec = finder.find_spec
sys.meta_path[:] = [Around(finder) for finder in sys.meta_path]
from torch.optim.optimizer import hooks
(hook,) = hooks
hook()
"""
    run(board, tmp_path, source)
    assert words(board)[-1] == 1


def test_a_torch_that_cannot_say_whether_it_compiles(board: Board, tmp_path: Path) -> None:
    pretend_torch(tmp_path, "")
    run(board, tmp_path, "from torch.optim.optimizer import hooks\n(hook,) = hooks\nhook()")
    assert words(board) == [0] * len(MARKS)


def test_a_worker_that_is_told_of_after_the_end_was_ordered(board: Board) -> None:
    told: list[dict[str, Any]] = []

    async def scenario() -> None:
        phases = Phases(lambda _, **fields: told.append(fields))
        phases.start(1, 0, 1, board)
        phases.stop()
        phases.spawned()
        phases.imported()
        phases.gone()
        phases.start(2, 1, 1, board)
        phases.close()

    asyncio.run(scenario())
    own = {"generation", "restart_count", "until_monotonic"}
    assert [set(fields) - own for fields in told] == [{"form_s"}, {"stop_s", "form_s"}]


@pytest.mark.parametrize(("preload", "ranks", "restarts"), [("none", 1, 0), ("torch", 2, 1)])
def test_the_phases_of_a_job(run_cli: Any, tmp_path: Path, preload: str, ranks: int, restarts: int) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINS))
    line = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    done = run_cli(
        [*line, "--log-dir", str(tmp_path / "logs"), "--preload", preload, str(tmp_path / "train.py")], timeout=LIMIT_S
    )
    assert done.code == 0, done
    assert len(done.out.splitlines()) >= 1 + restarts
    assert all("| 1 " in text and "WhenImported" not in text for text in done.out.splitlines()), done.out
    (folder,) = (tmp_path / "logs").iterdir()
    events = [json.loads(text) for text in (folder / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["event"] == "phases"]
    assert [(event["generation"], event["restart_count"]) for event in told] == [(1, 0), (2, 1)][: 1 + restarts]
    worker = ["import_s", "store_s", "process_group_s", "first_step_s"]
    for event, own in zip(told, (["form_s", "spawn_s"], ["detect_s", "stop_s", "form_s", "spawn_s"]), strict=False):
        assert {name for name in event if name.endswith("_s")} == {*own, *worker}
        assert all(event[name] >= 0 for name in own + worker)


FAILS_IN_BACKWARD = """
import logging, traceback, torch
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, grad): raise RuntimeError("lost rank 1")
weight = torch.zeros(1, requires_grad=True)
opt = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    try:
        Fails.apply(weight).sum().backward()
    except RuntimeError:
        print(traceback.format_exc())
    opt.step()
"""


def test_no_traceback_shows_a_frame_of_ours(warm: Warm, board: Board, tmp_path: Path) -> None:
    """Also where the program prints it itself, before the first step and after it."""
    shown = run(board, tmp_path, FAILS_IN_BACKWARD, warm)
    assert shown.count("RuntimeError: lost rank 1") == 3
    assert shown.count("Traceback") == 3
    assert "holdfast" not in shown.replace(str(tmp_path), "")
    assert "_tensor.py" in shown
    assert "program.py" in shown


MEETS = """
import datetime, os
import torch.distributed as dist
{before}
dist.init_process_group("gloo", {named}, timeout=datetime.timedelta(seconds=20))
dist.barrier()
print("met", os.environ["TORCHELASTIC_USE_AGENT_STORE"])
"""
BY_TCP = 'init_method="tcp://{host}:{port}", rank=0, world_size=1'


@pytest.mark.parametrize(
    ("agents", "before", "named"),
    [
        ("127.0.0.1:1", "", BY_TCP.format(host="127.0.0.1", port="<port>")),
        ("127.0.0.1:1", 'os.environ["MASTER_PORT"] = "<port>"', "rank=0, world_size=1"),
        ("192.0.2.1:<port>", "", BY_TCP.format(host="127.0.0.1", port="<port>")),
    ],
    ids=["port by tcp", "port by env", "host"],
)
def test_a_store_at_another_address_than_the_agents_is_the_programs_own(
    warm: Warm, board: Board, tmp_path: Path, free_port: Callable[[], int], agents: str, before: str, named: str
) -> None:
    number = str(free_port())
    host, port = agents.replace("<port>", number).split(":")
    source = MEETS.format(before=before, named=named).replace("<port>", number)
    env = {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert run(board, tmp_path, source, warm, **env) == "met True\n"


def test_another_name_of_the_agents_host_is_its_store(
    warm: Warm, board: Board, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    port = free_port()
    served = f'served = dist.TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)'
    source = MEETS.format(before=served, named=BY_TCP.format(host="localhost", port=port))
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert run(board, tmp_path, source, warm, **env) == "met True\n"

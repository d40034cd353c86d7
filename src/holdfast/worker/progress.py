"""Records a worker's moments on the board: its begin, its process group and its steps. Runs no user code.

The bootstrap loads it by its path, so it imports nothing of ours and must run under any Python. The bootstrap sets the
names `layout` (protocol/board_layout.py), `profiled` and `recorded`. Hooks torch after the program imports it, and
never imports it:

- `register_optimizer_step_post_hook`, torch's public global hook, counts steps, at about 0.5 microseconds each.
  Steps of an optimizer that is itself compiled (torch.compile) are not seen. Two optimizers make two steps, also if
  one steps the other (ZeroRedundancyOptimizer): no hook says where a step ends that has raised.
- `torch.autograd.backward`, which Tensor.backward calls too, gets a wrapper that adds up the time before it: the work
  of the rank alone, because in backward it waits for others.
- The handlers of `init_process_group`'s rendezvous are generators: their begin and their answer are the moments around
  the store. torch has no public hook there. Where its table is missing there are no such moments, and nothing else
  changes. Their end says nothing about the group: they end when it failed, too, and before it in a program that asks
  them by itself, as holdfast.train does.
- `_update_default_pg` gets the default group as soon as it exists.

One more task: gloo groups are never destructed. The destructor joins threads. The thread that drops the last reference
(of DDP's reducer, when the script's main function returns) may run it while it holds the interpreter's lock, for which
one of those threads waits: a finished script would hang for ever. (holdfast.train's process_group does the same for its
own groups, with the measurements; this is for other scripts.) A few idle threads remain.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from holdfast.protocol import board_layout as layout  # noqa: TC004 - the bootstrap puts it here

    def profiled(order: int, stepped: bool) -> bool:
        """Begin or end a profile; returns whether to call again after each step."""

    def recorded(c10d: ModuleType, words: memoryview, slot: int) -> None:
        """The program has a default process group: answer the agent's questions about its collectives."""

    Handler = Callable[..., Iterator[Any]]

USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
BACKWARD_TAKES = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
"""The arguments of torch.autograd.backward. Our wrapper has the same: *args and **kwargs would cost a quarter of a
microsecond."""


def begin(address: str) -> None:
    """Record the moments to come. `address` is the value of HOLDFAST_BOARD. Never raises."""
    missing = set(HOOKS)
    agents_store = (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    if missing & sys.modules.keys():
        marks = open_marks(address, agents_store)
        for name in missing & sys.modules.keys():
            if marks is not None:
                HOOKS[name](marks, sys.modules[name])
            missing.discard(name)
    if missing:
        sys.meta_path.insert(0, _WhenImported(address, missing, agents_store))


def open_marks(address: str, agents_store: tuple[str, str]) -> Marks | None:
    """Map the board; None: there is no agent, or it is gone. A program without torch never calls this."""
    import mmap

    path, _, slot = address.rpartition("@")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return Marks(memoryview(mmap.mmap(fd, 0)).cast("Q"), int(slot), agents_store)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


class _StepCounter:
    """Counts steps, and the time that a rank needs for them by itself. Closures, because they run in every step."""

    def __init__(self, words: memoryview, slot: int) -> None:
        steps, last, own = (slot + mark for mark in (layout.STEPS, layout.LAST_STEP, layout.OWN))
        first = slot + layout.FIRST_STEP
        now_ns = time.monotonic_ns
        torch: Any = sys.modules["torch"]
        ordered, follow_order = slot + layout.PROFILE, profiled
        ours, count, own_ns, profiling = True, 0, 0, False
        since_ns = 0  # the end of the newest step or backward; 0 before the first step and inside a backward

        def step_is_done(*_: object) -> None:
            nonlocal count, since_ns, profiling
            # A step that is being compiled must not have our call in its graph: it does not count. Where torch is too
            # old to report compilation, no step counts.
            try:
                if torch.compiler.is_compiling() or not ours:
                    return
            except AttributeError:
                return
            count += 1
            since_ns = now_ns()
            # The count is written last: a reader that sees it finds the times of this step, too.
            words[own] = own_ns
            words[last] = since_ns
            words[steps] = count
            if count == 1:
                words[first] = since_ns
            if words[ordered] or profiling:
                profiling = follow_order(words[ordered], True)
                since_ns = now_ns()  # to begin or end a profile is no work of the rank

        def around(original: Any) -> Any:
            import functools

            def backward(
                tensors: Any,
                grad_tensors: Any = None,
                retain_graph: Any = None,
                create_graph: Any = False,
                grad_variables: Any = None,
                inputs: Any = None,
            ) -> Any:
                nonlocal since_ns, own_ns
                begin_ns = since_ns  # read once: a backward of another thread may begin after the check
                if not begin_ns or not ours:
                    try:
                        return original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
                    except BaseException as error:
                        _hide_this_frame(error)
                        raise
                own_ns += now_ns() - begin_ns
                since_ns = 0  # a backward inside this one (checkpointing) is part of it
                try:
                    return original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
                except BaseException as error:
                    _hide_this_frame(error)
                    raise  # unchanged: only `raise error` would put this frame back
                finally:
                    since_ns = now_ns()

            _skip_when_compiling(backward, original)
            return functools.update_wrapper(backward, original)

        def disown() -> None:
            nonlocal ours
            ours = False

        self.step_is_done, self.around, self.disown = step_is_done, around, disown


class Marks:
    """The moments in this worker's slot. Its children map the memory too, but write nothing."""

    def __init__(self, words: memoryview, slot: int, agents_store: tuple[str, str]) -> None:
        """`agents_store` is host and port of the agent's store, read before the program can change the variables."""
        self._words = words
        self._slot = slot
        self._agents_store = agents_store
        self._own = True
        """Whether this process is the worker, and no child of it. A call of getpid() would cost more than all our other
        work for a step."""
        self._steps = _StepCounter(words, slot)
        os.register_at_fork(after_in_child=self._disown)

    def _disown(self) -> None:
        self._own = False
        self._steps.disown()

    def mark(self, which: int) -> None:
        """Record a moment; only the first time counts."""
        if self._own and not self._words[self._slot + which]:
            self._words[self._slot + which] = time.monotonic_ns()

    def grouped(self, c10d: ModuleType) -> None:
        """The process has a default group."""
        if self._own:
            # Without a rendezvous it is none of the job's: a replacement has a group of its own until it has a place.
            if self._words[self._slot + layout.STORE]:
                self.mark(layout.GROUP)
            recorded(c10d, self._words, self._slot)

    def count_steps(self, optimizer: ModuleType) -> None:
        """Hook torch.optim.optimizer."""
        register = getattr(optimizer, "register_optimizer_step_post_hook", None)
        if register is not None:
            register(self._steps.step_is_done)

    def time_backward(self, autograd: ModuleType) -> None:
        """Hook torch.autograd. A torch whose backward takes other arguments is left alone: then a rank's own work is
        unknown."""
        code = getattr(getattr(autograd, "backward", None), "__code__", None)
        if code is not None and code.co_varnames[: code.co_argcount] == BACKWARD_TAKES:
            autograd.backward = self._steps.around(autograd.backward)  # type: ignore[attr-defined]

    def watch_rendezvous(self, rendezvous: ModuleType) -> None:
        """Hook torch.distributed.rendezvous."""
        handlers: dict[str, Handler] = getattr(rendezvous, "_rendezvous_handlers", {})
        for scheme, handler in handlers.items():
            handlers[scheme] = self._with_marks(handler)

    def _with_marks(self, handler: Handler) -> Handler:
        def rendezvous(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self.mark(layout.MEETING)
            foreign = bool(args) and self._is_foreign(str(args[0]))
            if foreign:
                os.environ[USE_AGENT_STORE] = "False"
            try:
                for found in handler(*args, **kwargs):
                    if foreign:
                        os.environ[USE_AGENT_STORE], foreign = "True", False
                    self.mark(layout.STORE)
                    yield found
            finally:
                if foreign:
                    os.environ[USE_AGENT_STORE] = "True"

        return rendezvous

    def _is_foreign(self, url: str) -> bool:
        """Whether the program asks for another store than the agent's: then rank 0 has to serve it itself.

        torch does so from 2.14 on. An older torch makes every rank a client of any given address, even of one that has
        no server, as long as TORCHELASTIC_USE_AGENT_STORE is True.
        """
        if os.environ.get(USE_AGENT_STORE) != "True":
            return False
        host, port = _store_of(url)
        if not port or (host, port) == self._agents_store:
            return False
        # If the port is taken, it is the agent's store, by another name of this host.
        return port != self._agents_store[1] or _is_free(int(port))


def _store_of(url: str) -> tuple[str, str]:
    """Host and port of the store that a process group requests; the port is empty where the address has none."""
    from urllib.parse import urlsplit  # torch has loaded it

    try:
        parts = urlsplit(url)  # torch makes `env:?rank=0` of `env://`
        if parts.scheme == "env":
            host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
            return host, port if port.isdecimal() else ""
        return parts.hostname or "", str(parts.port or "") if parts.scheme == "tcp" else ""
    except ValueError:
        return "", ""


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
    return True


def _hide_this_frame(error: BaseException) -> None:
    """Remove the first frame from the error's traceback: it is the caller's, and names a file that nobody can find."""
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:
        error.__traceback__ = trace.tb_next


def keep_groups(marks: Marks, c10d: ModuleType) -> None:
    """Hook torch.distributed.distributed_c10d: every gloo group stays to the end of the process, the default one from
    its beginning, the others when all are destroyed. A torch without such a function is left alone."""
    update = getattr(c10d, "_update_default_pg", None)
    if update is None:
        return
    kept: dict[int, Any] = {}

    def update_default_pg(group: Any) -> Any:
        for each in list(getattr(c10d._world, "pg_map", ())) if group is None else [group]:
            _keep_group(c10d, each, kept)
        if group is not None:
            marks.grouped(c10d)
        return update(group)

    c10d._update_default_pg = update_default_pg  # type: ignore[attr-defined]
    c10d._holdfast_kept = kept  # type: ignore[attr-defined] # train/group.py takes out what a regroup destroys


def _keep_group(c10d: Any, group: Any, kept: dict[int, Any]) -> None:
    backend = c10d._world.pg_map.get(group, ("",))[0]
    if "gloo" in str(backend) and id(group) not in kept:  # nccl's groups hold memory of the GPU
        import ctypes  # torch has loaded it

        kept[id(group)] = group
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _skip_when_compiling(function: Any, original: Any) -> None:
    """Make torch's compiler skip this function: it skips functions of torch's own folder, and now this seems to be
    one."""
    file = os.path.join(os.path.dirname(original.__code__.co_filename), "holdfast", "worker", "progress.py")
    function.__code__ = function.__code__.replace(co_filename=file)


HOOKS: dict[str, Callable[[Marks, ModuleType], None]] = {
    "torch.autograd": Marks.time_backward,
    "torch.optim.optimizer": Marks.count_steps,
    "torch.distributed.rendezvous": Marks.watch_rendezvous,
    "torch.distributed.distributed_c10d": keep_groups,
}
"""The hook to call when the program has imported a module."""


class _WhenImported:
    """A finder that finds nothing: it calls hooks when modules have been imported, and then removes itself."""

    def __init__(self, address: str, names: set[str], agents_store: tuple[str, str]) -> None:
        self._address = address
        self._agents_store = agents_store
        self._names = names
        self._marks: Marks | None = None
        self._pid = os.getpid()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names or os.getpid() != self._pid:
            return None  # a child may be the first to import torch: it must not write to the board
        self._names.discard(name)
        if not self._names:
            # We may be gone from the list: a program can wrap each finder.
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        self._marks = self._marks or open_marks(self._address, self._agents_store)
        if self._marks is None:
            return None
        marks, hook = self._marks, HOOKS[name]
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    _call_after(spec.loader, lambda module: hook(marks, module))
                    return spec
        return None


def _call_after(loader: Any, hook: Callable[[ModuleType], None]) -> None:
    """Call `hook` when this loader has executed its module. Loaders that cannot be changed are left alone."""
    try:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # first: the program's own code must not find our function
            execute(module)
            hook(module)

        loader.exec_module = exec_module
    except AttributeError:
        return

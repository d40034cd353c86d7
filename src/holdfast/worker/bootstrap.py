"""Runs a user's Python program as `python` itself would, and records the exception that ends it.

    python -u bootstrap.py script|module|run_path TARGET [arguments…]
    python -u bootstrap.py fork-server …       the process from which workers are forked, see fork_server.py

Standard library only and nothing of holdfast: it is run by its path, by any Python that the user chose. The program
must not see a difference: `__main__`, `sys.argv`, `sys.path[0]`, tracebacks and exit codes are those of a plain `python
-u TARGET` or `python -u -m TARGET`. Only `sys` and `os` are imported before `sys.path` is the program's, and everything
else as late as possible, because imports delay the program.

The error file has torchelastic's format: see `write_error_file`.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType, ModuleType, TracebackType
    from typing import Any

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
BOARD = "HOLDFAST_BOARD"
STACKS_FD = 600
"""Number for the descriptor of the file for stacks, if it is free: above those that forking.py uses during a fork."""


# --- the error file ---------------------------------------------------------------------------------------------------


def write_error_file(path: str, error: BaseException, traceback_text: str) -> None:
    """Write the error file of torchelastic's `record`, whole or not at all. Raises OSError."""
    _write_whole(path, _error_file_text(error, traceback_text))


def _error_file_text(error: BaseException, traceback_text: str) -> str:
    import json
    import time

    extra: dict[str, Any] = {"py_callstack": traceback_text, "timestamp": str(int(time.time()))}
    extra.update(_collective_of(error))
    return json.dumps({"message": {"message": f"{type(error).__name__}: {_message_of(error)}", "extraInfo": extra}})


def _write_whole(path: str, text: str) -> None:
    if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe, which cannot be replaced
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a program's own __str__ may raise anything
        return "<exception str() failed>"  # the words of the interpreter's own traceback


CHAIN_MAX = 16
"""Number of exceptions of a chain that are examined."""
TENSORS_MAX = 16
"""Number of tensors in a frame's variables that are described."""
LISTED_MAX = 4
"""Number of tensors in a list that are described."""
TRANSPORTS = ("gloo/transport", "NCCL", "ncclRemoteError")
"""Parts of the messages of `work.wait()`, which is no function of Python, so that no frame shows it."""


def _collective_of(error: BaseException) -> dict[str, Any]:
    """The collective in which the root of an exception was raised, and the shapes of its tensors and of those in the
    script's variables; empty: it was raised elsewhere.

    When ranks call a collective with other sizes, the error appears on a rank that did nothing wrong. Only a comparison
    of the calls shows which rank differs from the others.
    """
    try:
        chain = _chain(error)
        call = next((call for each in reversed(chain) if (call := _call_in(each.__traceback__))), "")
        if not call and not any(word in _message_of(chain[-1]) for word in TRANSPORTS):
            return {}  # neither in a call nor in the wait for one that was begun before
        tensors: dict[str, str] = {}
        for each in chain:
            tensors |= _tensors_in(each.__traceback__)
    except Exception:  # noqa: BLE001 - objects of the program may do anything
        return {}
    return {"collective": call, "tensors": tensors, "recorded_collectives": _recorded_collectives()}


def _recorded_collectives() -> list[list[Any]]:
    """The newest collectives of this process, as torch's flight recorder has them; empty: it has none."""
    try:
        recorder = getattr(sys.modules.get(C10D), RECORDER, None)
        return recorder.newest() if recorder is not None else []
    except Exception:  # noqa: BLE001 - names of torch that may change
        return []


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and those that caused it, the root last."""
    chain = [error]
    while len(chain) < CHAIN_MAX:
        before = chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__)
        if before is None:
            break
        chain.append(before)
    return chain


def _call_in(trace: TracebackType | None) -> str:
    """The outermost call of a collective in this traceback, as text; empty: there is none."""
    for frame in _frames(trace):
        name = frame.f_code.co_name
        if _file(frame).endswith("/torch/distributed/distributed_c10d.py") and not name.startswith(("_", "wrapper")):
            arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            given = [_shape_of(frame.f_locals.get(each)) for each in arguments]
            return f"{name}({', '.join(each for each in given if each)})"
    return ""


def _tensors_in(trace: TracebackType | None) -> dict[str, str]:
    """The shapes of tensors in the script's variables, by name; inner frames replace outer ones."""
    found: dict[str, str] = {}
    for frame in _frames(trace):
        module = str(frame.f_globals.get("__name__"))
        if "site-packages" not in _file(frame) and module.partition(".")[0] != "torch":
            shapes = {key: _shape_of(value) for key, value in frame.f_locals.items() if not key.startswith("_")}
            found |= dict([(key, shape) for key, shape in shapes.items() if shape][:TENSORS_MAX])
    return found


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace(os.sep, "/")


def _shape_of(value: Any) -> str:
    """`float32[5000]` for a tensor, `[float32[4], float32[4]]` for a list of them; empty for anything else."""
    if type(value) in (list, tuple) and value:
        parts = [_shape_of(each) for each in value[:LISTED_MAX]]
        return f"[{', '.join(parts)}{', ...' if len(value) > LISTED_MAX else ''}]" if all(parts) else ""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return ""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


C10D = "torch.distributed.distributed_c10d"
RECORDER = "_holdfast_recorder"
"""Attribute of that module with what reads the collectives of this process (extensions/hangs/worker.py)."""
RECORD_ATTEMPTS = 3
"""Number of attempts to record an exception: a signal handler of the program may raise during one, as torch's does when
a process of a DataLoader has died."""
RECORD_S_MAX = 3.0
"""Limit for the disk of the error file (s): the traceback comes after it, and the other ranks wait for the report."""


class _Recorder:
    """Writes the error file of this process, once, unless other code (torch's own @record) already has."""

    def __init__(self) -> None:
        # Made absolute before the program can change its folder.
        self._path = os.path.abspath(os.environ[ERROR_FILE]) if os.environ.get(ERROR_FILE) else ""
        self._pid = os.getpid()

    def record(self, error: BaseException) -> None:
        """Write the file. Never raises, and waits RECORD_S_MAX at most: a full disk, one that does not respond or a
        broken __str__ must not hide the program's own error.

        Called before the traceback is shown: the program's hook for that may end the process.
        """
        if not self._path or os.getpid() != self._pid:  # a child of the worker has the variable, too
            return
        written: Any = None
        for _ in range(RECORD_ATTEMPTS):
            try:
                if written is None:
                    written = self._begin_to_write(error)
                written.acquire(timeout=RECORD_S_MAX)
            except Exception:  # noqa: BLE001
                continue
            return

    def _begin_to_write(self, error: BaseException) -> Any:
        """Write the file in a thread: a disk may never respond. Returns a lock that is free when it is done."""
        import _thread  # not threading, which takes longer and which a module of the program may hide
        import traceback

        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        text = _error_file_text(error, trace)
        written = _thread.allocate_lock()
        written.acquire()

        def write() -> None:
            try:
                self._write(text)
            finally:
                written.release()

        try:
            _thread.start_new_thread(write, ())
        except RuntimeError:  # the limit of threads is reached
            write()
        return written

    def _write(self, text: str) -> None:
        # The program has recorded it by itself, as with torch's @record, and may know more
        # (test_what_was_written_already_stays).
        try:
            if not (os.path.exists(self._path) and os.path.getsize(self._path) > 0):
                _write_whole(self._path, text)
        except Exception:  # noqa: BLE001
            return


# --- running the program ----------------------------------------------------------------------------------------------


def _fresh_main() -> ModuleType:
    """Replace our `__main__` by one as the interpreter makes it."""
    import builtins

    main = type(sys)("__main__")
    vars(main).update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main
    return main


def _importer_for(path: str) -> object:
    """The importer of a folder or archive; None for anything else. The interpreter checks the same before it opens a
    script."""
    for hook in sys.path_hooks:
        try:
            return hook(path)
        except ImportError:
            continue
    return None


def _absolute(path: str) -> str:
    """Make a path absolute as the interpreter does: joined to the current folder, not normalised."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def _set_first_path(entry: str) -> None:
    """Replace our own folder, which the interpreter put first, by the program's."""
    if getattr(sys.flags, "safe_path", False):  # with -P there is no such entry
        return
    sys.path[0] = entry


def _code_of(path: str) -> CodeType:
    """Compile a script. A SyntaxError is the program's. A script that cannot be read is reported as the interpreter
    does it, and ends this process with 2."""
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        if error.filename is None:  # the bytes are not text
            error.filename, error.lineno = path, 1
        raise


def _prepare_script(target: str) -> Callable[[], Any]:
    """Set up this process for a script, or for a folder or archive with a `__main__.py`. Returns what runs it."""
    path = _absolute(target)
    main = _fresh_main()
    if _importer_for(path) is not None:
        # Inserted even with -P: the program is in it.
        if not getattr(sys.flags, "safe_path", False):
            del sys.path[0]
        sys.path.insert(0, path)
        return lambda: _run_module("__main__", alter_argv=False)
    _set_first_path(os.path.dirname(os.path.realpath(path)))

    def run() -> None:
        # Not importlib.machinery, which is one module more than a plain start loads.
        machinery: Any = sys.modules["_frozen_importlib_external"]
        compiled = path.endswith(".pyc")
        kind = machinery.SourcelessFileLoader if compiled else machinery.SourceFileLoader
        loader = kind("__main__", path)
        main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
        code = loader.get_code("__main__") if compiled else _code_of(path)
        exec(code, main.__dict__)

    return run


def _prepare_module(target: str) -> Callable[[], Any]:
    """Set up this process for `-m TARGET`. Returns what runs it."""
    _fresh_main()
    try:
        here = os.getcwd()
    except OSError:  # the folder was deleted
        here = ""
    _set_first_path(here)
    sys.argv[0] = "-m"
    return lambda: _run_module(target, alter_argv=True)


def _run_module(name: str, *, alter_argv: bool) -> None:
    import runpy

    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


# --- reporting the end ------------------------------------------------------------------------------------------------


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    # Not __file__, which is the cached file if the program was started from that.
    own = _without_own_frames.__code__.co_filename
    while trace is not None and trace.tb_frame.f_code.co_filename == own:
        trace = trace.tb_next
    return trace


def _hide_own_frames(report_to_agent: Callable[[], None]) -> None:
    """Let the interpreter report the exception in flight, without our frames; then report it to the agent.

    Only the interpreter reports exactly as it does: exit codes, `sys.last_*`, KeyboardInterrupt and a faulty
    sys.excepthook. Our hook replaces the program's from here, where no code of the program runs any more, until the
    report. After that, the program exits as a successful one does.
    """
    programs_hook = getattr(sys, "excepthook", sys.__excepthook__)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        sys.excepthook = programs_hook
        trace = _without_own_frames(trace)
        error.__traceback__ = sys.last_traceback = trace
        ends = not isinstance(error, KeyboardInterrupt)  # after that one the interpreter kills itself by SIGINT
        try:
            programs_hook(kind, error, trace)
        except BaseException as fault:
            fault.__traceback__ = _without_own_frames(fault.__traceback__)
            raise
        finally:
            # Now the traceback is on stderr, where the agent looks for the cause. Threads and exit functions come
            # later: they may be slow, and the other ranks wait.
            if ends:
                report_to_agent()
        if ends:
            _leave_soon()

    sys.excepthook = hook


# --- leaving ----------------------------------------------------------------------------------------------------------


def _ends_abruptly() -> bool:
    """Whether the program is to exit without the interpreter's last phase.

    In that phase Python ends every thread that asks for its lock, and a thread of torch's C++ side (autograd, DDP's
    reducer, gloo) that asks for it aborts the whole process: "terminate called without an active exception", SIGABRT.
    Measured: 3 of 50 jobs that had finished their training on two cores "failed" in this way. After an exception the
    phase costs a rank with DDP more than a second of processor time, and delays the report of the exception.
    """
    return "torch" in sys.modules


def _exit_code(end: SystemExit) -> int:
    """The exit code that the interpreter would use. A text as exit code is written to stderr, as the interpreter
    does."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    import contextlib

    with contextlib.suppress(AttributeError, OSError, ValueError):  # no usable stderr
        sys.stderr.write(f"{end.code}\n")
    return 1


def _exception_behind_exit(end: SystemExit) -> BaseException | None:
    """The exception that the program was handling when it called sys.exit with a number; None: there is none.

    It is the reason for the exit, which the program has at most logged. If it called sys.exit with a text, the text is
    the reason.
    """
    handled = end.__cause__ or end.__context__
    failed = isinstance(end.code, int) and end.code & 0xFF != 0
    return handled if failed and not isinstance(handled, SystemExit | KeyboardInterrupt) else None


END_REPORT_S = 5.0
"""Time after an exception from which threads and exit functions that have not ended are reported."""
END_S_MAX = 15.0
"""Limit after an exception for threads and exit functions: all other ranks wait."""


def _leave_soon() -> None:
    """Exit after an exception that was reported. Returns if the interpreter's last phase is to follow."""
    try:
        import threading

        threading.Thread(target=_limit_the_end, daemon=True, name="holdfast-end").start()
    except (ImportError, AttributeError, RuntimeError):
        return  # no thread can be started, or the program has a module of that name: end as usual
    if _ends_abruptly():
        _leave(1)


def _limit_the_end() -> None:
    import contextlib
    import threading
    import time

    time.sleep(END_REPORT_S)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place = f"{frame.f_code.co_name} at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "?"
    text = f"holdfast: process {os.getpid()} raised an exception {END_REPORT_S:g} s ago and has not ended: "
    text += f"it is in {place} (a thread or an exit function); it is ended in {END_S_MAX - END_REPORT_S:g} s\n"
    with contextlib.suppress(OSError):  # the reader is gone
        os.write(2, text.encode(errors="replace"))
    time.sleep(END_S_MAX - END_REPORT_S)
    os._exit(1)


def _unfreeze() -> None:
    """Let the interpreter's last phase free the objects that the fork server froze, as in a worker that was started by
    exec: some libraries report then what is left."""
    import gc

    gc.unfreeze()


def _leave(code: int) -> None:
    """Exit without the interpreter's last phase, but with all that comes before it: threads, atexit, buffers."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):
            continue  # the program has replaced or closed it
        except OSError:
            code = code or 120  # the interpreter's own code for output that could not be written
    os._exit(code)


# --- what the agent sees, and the fork server -------------------------------------------------------------------------


def _serve_as_fork_server() -> None:
    """Run the fork server. Returns in each forked worker, where everything is as after its own start.

    It runs inside the bootstrap, so that workers have the same frames below them however they were started.
    """
    folder, control_fd = sys.argv[2:4]
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    forking = _load(os.path.join(folder, "forking.py"))
    seqpacket = _load(os.path.join(os.path.dirname(folder), "seqpacket.py"))
    fork_server = _load(os.path.join(folder, "fork_server.py"), forking=forking, seqpacket=seqpacket)
    fork_server.serve(int(control_fd))


def _serve_agent() -> Callable[[], None]:
    """Show our progress on the agent's board, and our stacks when the agent samples them; without an agent, nothing.

    Returns a function that reports to the agent that the program raised an exception.
    """
    address = os.environ.get(BOARD, "")
    if address:
        folder = os.path.dirname(os.path.abspath(__file__))
        if os.path.basename(folder) == "__pycache__":  # an installation may start the cached file
            folder = os.path.dirname(folder)
        board = _load(os.path.join(os.path.dirname(folder), "protocol", "board_layout.py"))
        _take_slot(address, board)
        _write_stacks_on_signal(address, board)
        _write_handled_exception_on_signal(address, board)
        package = os.path.dirname(folder)
        profiled = _take_profiles(address, board, package)
        given = {"profiled": profiled, "recorded": _answer_about_collectives(address, board, package)}
        _load(os.path.join(folder, "progress.py"), layout=board, **given).begin(address)
        own_pid = os.getpid()
        return lambda: _report_exception(address, board) if os.getpid() == own_pid else None
    return lambda: None


def _take_slot(address: str, board: Any) -> None:
    """Write on the board that this process is the worker: its children inherit the variable, and one of them may ask
    for a safe point first."""
    path, _, slot = address.rpartition("@")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.pwrite(
                fd, os.getpid().to_bytes(board.WORD_BYTES, sys.byteorder), (int(slot) + board.PID) * board.WORD_BYTES
            )
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return  # the agent is gone


def _report_exception(address: str, board: Any) -> None:
    """Report to the agent that the program raised an exception, before the process ends."""
    try:
        slot = int(address.rpartition("@")[2])
        pipe = _open_of_agent(address, board, board.RAISED, os.O_NONBLOCK)
        try:
            os.write(pipe, slot.to_bytes(board.REPORT_BYTES, sys.byteorder))
        finally:
            os.close(pipe)
    except (OSError, ValueError, OverflowError):
        return  # the agent is gone, or unreachable: it sees the process end


def _read_word(address: str, board: Any, word: int) -> int:
    """Read a word of the agent's board. Raises OSError."""
    fd = os.open(address.rpartition("@")[0], os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int.from_bytes(os.pread(fd, board.WORD_BYTES, word * board.WORD_BYTES), sys.byteorder)
    finally:
        os.close(fd)


def _open_of_agent(address: str, board: Any, word: int, flags: int) -> int:
    """Open for writing the agent's file whose descriptor number is in this word of its board. Raises OSError,
    ValueError."""
    number = _read_word(address, board, word)
    if not number:
        raise ValueError("there is none")
    return os.open(f"{os.path.dirname(address)}/{number}", os.O_WRONLY | os.O_CLOEXEC | flags)


def _take_profiles(address: str, board: Any, package: str) -> Callable[[int, bool], bool]:
    """Take profiles on the agent's signal, for orders that do not count steps. Returns the function to call after each
    step while there is an order: Profiler.follow."""
    profiler: Any = None
    own_pid = os.getpid()

    def follow(order: int, stepped: bool) -> bool:
        nonlocal profiler
        try:
            if profiler is None:
                path = os.path.join(package, "extensions", "profile", "worker.py")
                profiler = _load(path, layout=board).Profiler(os.path.dirname(address))
            return bool(profiler.follow(order, stepped=stepped))
        except Exception:  # noqa: BLE001 - an optimizer's step calls this, and the file may be of a newer holdfast by now
            return False

    def signalled(*_: object) -> None:
        if os.getpid() == own_pid:
            try:
                follow(_read_word(address, board, int(address.rpartition("@")[2]) + board.PROFILE), False)
            except OSError:
                return  # the agent is gone

    try:
        import _signal  # type: ignore[import-not-found] # the C part of signal: nothing else is imported

        _signal.signal(board.PROFILE_SIGNAL, signalled)
        # Else a system call of a library would fail at the signal (EINTR).
        _signal.siginterrupt(board.PROFILE_SIGNAL, False)
    except (ImportError, OSError, ValueError):
        pass  # this Python lacks the function, or we are not in the main thread: steps can be profiled
    return follow


def _answer_about_collectives(address: str, board: Any, package: str) -> Callable[[Any, memoryview, int], None]:
    """Returns the function to call with each default process group: from the first one on the agent can ask what
    torch's flight recorder has. It gets torch.distributed.distributed_c10d, the board and our slot on it."""
    own_pid = os.getpid()
    recorder: Any = None

    def recorded(c10d: Any, words: memoryview, slot: int) -> None:
        nonlocal recorder
        if os.getpid() != own_pid:
            return
        try:
            if recorder is None:
                path = os.path.join(package, "extensions", "hangs", "worker.py")
                recorder = _load(path, layout=board).Recorder(c10d)
                setattr(c10d, RECORDER, recorder)
                recorder.serve(os.path.dirname(address), words, slot)
            recorder.begin_group()
        except Exception:  # noqa: BLE001 - init_process_group calls this, as above
            return

    return recorded


def _write_handled_exception_on_signal(address: str, board: Any) -> None:
    """Write the exception that the main thread handles into the agent's file for stacks, on its signal."""
    own_pid = os.getpid()

    def signalled(*_: object) -> None:
        error = sys.exc_info()[1]  # this runs inside of the `except` or `finally`
        if error is not None and os.getpid() == own_pid:
            try:
                _write_handled(error, address, board)
            except (OSError, ValueError):
                return  # the agent is gone

    try:
        import _signal  # the C part of signal: nothing else is imported

        _signal.signal(board.HANDLED_SIGNAL, signalled)
    except (ImportError, OSError, ValueError):
        return  # we are not in the main thread


def _write_handled(error: BaseException, address: str, board: Any) -> None:
    """Write type, message and place of an exception into the agent's file. Raises OSError, ValueError."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - the program's own code
        message = ""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    at = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    line = " ".join(f"{type(error).__name__}: {message}".split())
    file = _open_of_agent(address, board, int(address.rpartition("@")[2]) + board.STACKS, os.O_APPEND)
    try:
        os.write(file, f"{board.HANDLED}{line[: board.HANDLED_CHARACTERS_MAX]}\n{at}\n".encode(errors="replace"))
    finally:
        os.close(file)


def _write_stacks_on_signal(address: str, board: Any) -> None:
    """Write all stacks into the agent's file on its signal. faulthandler is C code: it works whichever thread has the
    interpreter's lock."""
    try:
        import faulthandler

        file = _open_of_agent(address, board, int(address.rpartition("@")[2]) + board.STACKS, os.O_APPEND)
        stacks = _with_high_number(file)
        faulthandler.register(board.LOOK_SIGNAL, stacks, all_threads=True)
        faulthandler.register(board.LOOK_MAIN_SIGNAL, stacks, all_threads=False)
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError):
        return  # the agent is gone, or this Python lacks the function


def _with_high_number(fd: int) -> int:
    """Move a descriptor to a number that programs do not use. Programs that this one executes do not inherit it."""
    for number in range(min(STACKS_FD, os.sysconf("SC_OPEN_MAX") - 1), 2, -1):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(fd, number, inheritable=False)
            os.close(fd)
            return number
    return fd


def _load(path: str, **given: Any) -> Any:
    """Load a module of ours by its path, so that no other module can find it."""
    machinery: Any = sys.modules["_frozen_importlib_external"]
    name = os.path.basename(path).removesuffix(".py")
    module = type(sys)(name)
    module.__dict__.update(given)
    exec(machinery.SourceFileLoader(name, path).get_code(name), module.__dict__)
    return module


def main() -> None:
    """Run the program that the arguments name, in this process."""
    forked = sys.argv[1] == "fork-server"
    if forked:
        _serve_as_fork_server()

    recorder = _Recorder()
    mode, target = sys.argv[1:3]
    if hasattr(sys, "orig_argv"):
        options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
        sys.orig_argv[1:] = [*options, *(["-m"] if mode == "module" else []), *sys.argv[2:]]
    del sys.argv[:2]
    report_to_agent = _serve_agent()
    run = _prepare_module(target) if mode == "module" else _prepare_script(target)
    try:
        import faulthandler

        faulthandler.enable()
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError):
        pass  # no usable stderr

    try:
        run()
    except SystemExit as end:
        handled = _exception_behind_exit(end)
        if handled is not None:
            handled.__traceback__ = _without_own_frames(handled.__traceback__)
            recorder.record(handled)
        if _ends_abruptly():
            _leave(_exit_code(end))
        raise
    # Not all exceptions that end a program inherit from Exception: torch's CheckpointException does not
    # (test_every_uncaught_exception_is_recorded).
    except BaseException as error:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        if not isinstance(error, KeyboardInterrupt):  # it comes from outside and explains nothing
            recorder.record(error)
        _hide_own_frames(report_to_agent)
        raise
    finally:
        if forked:
            _unfreeze()
    if _ends_abruptly():
        _leave(0)


if __name__ == "__main__":
    main()

"""Everything that a program can see of how it was started; both kinds of worker must see the same.

The first HOLDFAST_PROBE_RANKS ranks say it in each attempt; the others import nothing. With `light` no library is imported.
"""

import atexit
import ctypes
import decimal
import faulthandler
import fcntl
import gc
import glob
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings

LIGHT = "light" in sys.argv
PROBED = int(os.environ["RANK"]) < int(os.environ["HOLDFAST_PROBE_RANKS"])
if PROBED and not LIGHT:
    import numpy as np
    import torch
    import torch.distributed

PER_RUN = (
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "HOLDFAST_PROBE_FILE",
    "HOLDFAST_PROBE_RANKS",
    "HOLDFAST_BOARD",
    "HOLDFAST_SAVER",
    "LOGS_OF_PROBE",
)
libc = ctypes.CDLL(None)


def proc(name):
    with open(f"/proc/self/{name}", "rb") as file:
        return file.read()


def status():
    return dict(line.split(":\t", 1) for line in proc("status").decode().splitlines() if ":\t" in line)


def prctl(option):
    value = ctypes.c_int(-1)
    return [libc.prctl(option, ctypes.byref(value), 0, 0, 0), value.value]


def described(fd):
    target = os.readlink(f"/proc/self/fd/{fd}")
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    name = target.partition(":")[0] if kind in (stat.S_IFIFO, stat.S_IFSOCK) else os.path.basename(target)
    return [kind, name, fcntl.fcntl(fd, fcntl.F_GETFL), fcntl.fcntl(fd, fcntl.F_GETFD)]


def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = described(int(name))
        except OSError:
            continue  # the folder itself
    return found


def stream(name):
    it = getattr(sys, name)
    buffer = it.buffer
    raw = getattr(buffer, "raw", buffer)
    return {
        "same": it is getattr(sys, f"__{name}__"),
        "text": [type(it).__name__, it.encoding, it.errors, it.line_buffering, it.write_through, it.name, it.mode],
        "abilities": [it.seekable(), it.readable(), it.writable(), it.isatty(), it.fileno(), it.closed],
        "buffer": [type(buffer).__name__, type(raw).__name__, raw.name, raw.mode, raw.closefd],
        "newlines": repr(it.newlines),
        "chunk": it._CHUNK_SIZE,
    }


def signals():
    masks = status()
    real = {int(number): str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()}
    ours = {name: int(masks[name], 16) & ~(0b11 << 31) for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")}
    timers = [signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)]
    return {"python": real, "masks": ours, "timers": timers, "wakeup": signal.set_wakeup_fd(-1)}


def environment():
    shown = dict(entry.split(b"=", 1) for entry in proc("environ").split(b"\0") if b"=" in entry)
    libc.getenv.restype = ctypes.c_char_p
    posix = sys.modules["posix"]
    return {
        "variables": {name: value for name, value in os.environ.items() if name not in PER_RUN},
        "kind": [type(os.environ).__name__, type(os.environ._data).__name__],
        "names": sorted(os.environ),
        "c": all(libc.getenv(name) == value for name, value in os.environb.items()),
        "bytes": os.environb._data is os.environ._data,
        "posix": posix.environ == os.environ._data,
        "shown": shown == dict(os.environb),
    }


def limits():
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def process():
    me = os.getpid()
    with open(f"/proc/{os.getppid()}/comm") as file:
        parent = file.read().strip()
    return {
        "leads": [os.getsid(0) == me, os.getpgrp() == me],
        "parent": parent,
        "uid": [os.getresuid(), os.getresgid(), sorted(os.getgroups())],
        "cwd": os.getcwd(),
        "umask": status()["Umask"],
        "affinity": sorted(os.sched_getaffinity(0)),
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
        "comm": proc("comm").decode(),
        "cmdline": proc("cmdline").decode().split("\0"),
        "exe": os.readlink("/proc/self/exe"),
        "death_signal": prctl(2),
        "subreaper": prctl(37),
        "dumpable": libc.prctl(3, 0, 0, 0, 0),
        "oom": proc("oom_score_adj").decode(),
        "tasks": len(os.listdir("/proc/self/task")),
        "children": [p for p in os.listdir("/proc") if p.isdigit() and parent_of(p) == me],
    }


def parent_of(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def interpreter():
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "executable": sys.executable,
        "prefix": [sys.prefix, sys.base_prefix],
        "xoptions": sys._xoptions,
        "warnoptions": sys.warnoptions,
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags()],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace() is None],
        "threading": threading.excepthook is threading.__excepthook__,
        "importers": [str(each).partition(" at ")[0] for each in sys.meta_path],
        "path_hooks": len(sys.path_hooks),
        "encodings": [sys.getfilesystemencoding(), sys.getdefaultencoding(), locale.getlocale()],
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.garbage)],
        "decimal": str(decimal.getcontext()),
        "last": [hasattr(sys, "last_type"), hasattr(sys, "ps1")],
    }


def main_module():
    module = sys.modules["__main__"]
    return {
        "is_us": module.__dict__ is globals(),
        "name": __name__,
        "file": __file__,
        "spec": str(getattr(__spec__, "name", None)),
        "package": str(__package__),
        "loader": type(__loader__).__name__,
        "doc": __doc__,
        "cached": str(globals().get("__cached__", "none")),
        "builtins": type(__builtins__).__name__,
        "dunders": sorted(name for name in globals() if name.startswith("__")),
        "stack": [[os.path.basename(frame.filename), frame.name] for frame in traceback.extract_stack()],
    }


def libraries():
    return {
        "torch_threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch_state": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.cuda.is_initialized()],
        "distributed": [torch.distributed.is_initialized(), torch.distributed.is_torchelastic_launched()],
        "numpy": [str(np.get_printoptions()), str(np.geterr())],
    }


def standard_library():
    return {
        "warnings": [str(each) for each in warnings.filters],
        "logging": [logging.root.level, len(logging.root.handlers), logging.root.manager.disable],
        "atexit": atexit._ncallbacks(),
        "faulthandler": faulthandler.is_enabled(),
        "multiprocessing": [
            multiprocessing.get_start_method(allow_none=True),
            multiprocessing.get_all_start_methods(),
            multiprocessing.current_process().name,
            len(multiprocessing.active_children()),
            multiprocessing.parent_process() is None,
        ],
        "threads": [
            threading.active_count(),
            threading.current_thread() is threading.main_thread(),
            threading.main_thread().native_id == threading.get_native_id() == os.getpid(),
            threading.main_thread().ident == threading.get_ident(),
        ],
        "tempdir": tempfile.gettempdir(),
    }


def drawn_by_libraries():
    return {
        "numpy": np.random.rand(2).tolist(),
        "torch_seed": torch.initial_seed(),
        "torch": torch.rand(4).tolist(),
        "numpy_generator": np.random.default_rng().random(2).tolist(),
    }


def drawn():
    """What no two processes may share."""
    record = logging.makeLogRecord({})
    of_libraries = {} if LIGHT else drawn_by_libraries()
    return of_libraries | {
        "random": [random.random(), random.getrandbits(64)],
        "tempfile": tempfile.mktemp(),
        "uuid1": str(uuid.uuid1()),
        "uuid4": str(uuid.uuid4()),
        "urandom": os.urandom(8).hex(),
        "authkey": bytes(multiprocessing.current_process().authkey).hex(),
        "relative_ms": record.relativeCreated,
    }


def end_first_attempt(folder):
    """Fail when all that are probed have written, and the next attempt's workers are there, if they are forked ahead."""
    deadline = time.monotonic() + 60 * float(os.environ["TEST_SLOWNESS"])
    ranks = range(int(os.environ["HOLDFAST_PROBE_RANKS"]))
    while time.monotonic() < deadline:
        (journal,) = glob.glob(f"{folder}/*/events.jsonl")
        with open(journal) as file:
            text = file.read()
        ahead = '"event": "standby"' in text or '"modules": []' in text
        if PROBED and ahead and all(os.path.exists(path_of(rank)) for rank in ranks):
            sys.exit(3)
        time.sleep(0.05)
    sys.exit("no standby came")


def path_of(rank):
    return f"{os.environ['HOLDFAST_PROBE_FILE']}{os.environ['TORCHELASTIC_RESTART_COUNT']}.{rank}"


def main():
    facts = {"descriptors": descriptors()}
    print("to stdout")
    sys.stderr.write("to stderr\n")
    facts |= {
        "process": process(),
        "signals": signals(),
        "environment": environment(),
        "limits": limits(),
        "interpreter": interpreter(),
        "main": main_module(),
        "streams": {name: stream(name) for name in ("stdin", "stdout", "stderr")},
        "stdin": sys.stdin.readline(),
        "standard_library": standard_library(),
        "libraries": {} if LIGHT else libraries(),
    }
    told = {"same": facts, "drawn": drawn(), "modules": sorted(sys.modules), "hash": hash("seed")}
    path = path_of(os.environ["RANK"])

    def write():
        with open(f"{path}.part", "w") as file:
            json.dump(told, file)
        os.replace(file.name, path)

    atexit.register(write)
    if os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        write()


if __name__ == "__main__":
    if PROBED:
        main()
    if "LOGS_OF_PROBE" in os.environ and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        end_first_attempt(os.environ["LOGS_OF_PROBE"])

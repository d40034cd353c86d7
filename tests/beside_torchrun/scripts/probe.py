"""Writes down all that a program can know about how it was started, into $PROBE_DIR/<group rank>.<local rank>.<try>.json."""

import os
import sys

MODULES = sorted(sys.modules)


def link(path):
    try:
        return os.readlink(path)
    except OSError as error:
        return error.strerror


def descriptors():
    """Of those that were here before we looked."""
    listing = os.open("/proc/self/fd", os.O_RDONLY)
    found = {fd: link(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir(listing)) if fd != listing}
    os.close(listing)
    return {str(fd): target for fd, target in sorted(found.items()) if os.path.exists(f"/proc/self/fd/{fd}")}


def read(path):
    with open(path) as file:
        return file.read().strip()


def status():
    with open("/proc/self/status") as file:
        pairs = (line.split(":", 1) for line in file)
        return {name: value.strip() for name, value in pairs}


FDS = descriptors()


def main():
    import ctypes
    import json
    import resource
    import signal

    this = sys.modules["__main__"]
    facts = status()
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death))
    subreaper = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(subreaper))
    found = {
        "env": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "cwd": os.getcwd(),
        "path": sys.path,
        "executable": sys.executable,
        "flags": repr(sys.flags),
        "warnoptions": sys.warnoptions,
        "modules": MODULES,
        "main": {
            name: repr(value)
            for name, value in sorted(vars(this).items())
            if name.startswith("__") and name != "__builtins__"
        },
        "main loader": type(this.__loader__).__name__,
        "main builtins": type(this.__builtins__).__name__,
        "main is this": vars(this) is globals(),
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace() is None],
        "leads its session": os.getpid() == os.getsid(0),
        "leads its group": os.getpid() == os.getpgid(0),
        "fds": FDS,
        "ignored": facts["SigIgn"],
        "caught": facts["SigCgt"],
        "blocked": facts["SigBlk"],
        "handlers": {str(int(n)): str(signal.getsignal(n)) for n in sorted(signal.valid_signals())},
        "threads": facts["Threads"],
        "no new privileges": facts["NoNewPrivs"],
        "name": facts["Name"],
        "umask": facts["Umask"],
        "cpus": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "limits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
        },
        "parent death signal": death.value,
        "subreaper": subreaper.value,
        "terminals": [os.isatty(fd) for fd in (0, 1, 2)],
        "stdout": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stdout.write_through],
        "stderr": [sys.stderr.encoding, sys.stderr.errors, sys.stderr.line_buffering, sys.stderr.write_through],
        "oom": read("/proc/self/oom_score_adj"),
    }
    rank = os.environ.get("RANK", "x")
    name = f"{rank}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', 'x')}"
    place = os.path.join(os.environ["PROBE_DIR"], name)
    with open(place + ".part", "w") as file:
        json.dump(found, file)
    os.rename(place + ".part", place + ".json")
    print(f"out of {rank}")
    print(f"err of {rank}", file=sys.stderr)


def fail_after_all_have_reported():
    import time

    wanted = {f"{rank}.0.json" for rank in range(int(os.environ["WORLD_SIZE"]))}
    deadline = time.monotonic() + 30 * float(os.environ["TEST_SLOWNESS"])
    while wanted - set(os.listdir(os.environ["PROBE_DIR"])) and time.monotonic() < deadline:
        time.sleep(0.01)
    sys.exit(3)


if __name__ == "__main__":
    main()
    if "fail" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        fail_after_all_have_reported()

"""Ends by a signal."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

from .parts import one, script


@one(1, "HF204")
def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@one(0, "HF204", torch=True, ranks=3)
def killed_under_a_collective() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@one(1, "HF223")
def null_is_read() -> None:
    faulthandler._sigsegv()


@one(2, "HF223", torch=True, ranks=3)
def null_is_written_in_a_thread() -> None:
    threading.Thread(target=lambda: ctypes.memset(0, 1, 1)).start()
    time.sleep(30)


@one(1, "HF223")
def aborted() -> None:
    os.abort()


@one(1, "HF223", says="out_of_range")
def uncaught_in_c_plus_plus() -> None:
    sys.stderr.write(
        "terminate called after throwing an instance of 'std::out_of_range'\n"
        "  what():  vector::_M_range_check: __n (which is 9) >= this->size() (which is 4)\n"
    )
    sys.stderr.flush()
    os.abort()


@one(1, "HF223")
def file_shrinks_under_a_map() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(2**16)
        view = mmap.mmap(file.fileno(), 2**16)
        file.truncate(0)
        print(view[2**15])


@one(0, "HF223")
def division_in_native_code() -> None:
    os.kill(os.getpid(), signal.SIGFPE)


@one(1, "HF223")
def instruction_unknown() -> None:
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\x0f\x0b")
    ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()


@one(1, "HF235")
def ended_from_outside() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)


@one(1, "HF235")
def hung_up() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(30)


@one(1, "HF235 HF204")
def signal_of_a_user() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(30)


@one(1, "HF204 HF205")
def child_is_killed_and_its_code_passed_on() -> None:
    os._exit(128 - subprocess.run(["sh", "-c", "kill -9 $$"]).returncode)


SHELL = ("--no-python",)
script(
    "shell-script-whose-python-fails",
    "0 1",
    "HF211",
    says="deepspeed_of_ours",
    flags=SHELL,
    files={"train.sh": f"#!/bin/sh\nexport X=1\n{sys.executable} -c 'import deepspeed_of_ours'\n"},
)
script(
    "shell-script-with-an-unknown-command",
    "0 1",
    "HF205",
    says="127",
    flags=SHELL,
    files={"train.sh": "#!/bin/sh\npyhton3 train.py\n"},
)
script("program-without-an-interpreter", "0 1", "HF202", flags=SHELL, files={"train.sh": "#!/opt/none/bash\ntrue\n"})

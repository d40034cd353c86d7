"""A Python program in a process that was forked for it: it runs as `__main__`, with no frame of ours in its tracebacks.

It ends as an interpreter ends, but for the last phase: to take apart all that a process with torch has imported is a
third of a second of processor time. A worker that has imported torch ends in the same way (worker/bootstrap.py).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import types
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from typing import NoReturn


def run(path: str) -> NoReturn:
    kind = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    code = 0
    try:
        exec(kind("__main__", path).get_code("__main__"), main.__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - it is reported as the interpreter does it
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace  # what runs at exit reads them
        sys.excepthook(type(error), error, trace)
        code = 1
    leave(code)


def leave(code: int) -> NoReturn:
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)

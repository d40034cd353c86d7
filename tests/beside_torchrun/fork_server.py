"""torchrun, imported once: forks a process for each command line, which then is a torchrun like any other.

Importing torch takes torchrun two seconds; hundreds of lines would take minutes. `test_the_server_is_torchrun` holds a
forked one against the installed command.

    python fork_server.py SOCKET
    a connection: one line of JSON {argv, module, env, cwd, stdin, stdout, stderr} -> the pid, then the exit status
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import socket
import sys
import traceback
from typing import Any, NoReturn

MODULES = ("torch.distributed.run", "torch.distributed.launch")


def serve(path: str) -> NoReturn:
    for name in MODULES:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                listener.close()
                attend(connection)
            connection.close()


def attend(connection: socket.socket) -> NoReturn:
    """Starts what the connection asks for and tells how it ended."""
    with connection, connection.makefile("rw") as file:
        request = json.loads(file.readline())
        pid = os.fork()
        if pid == 0:
            connection.close()
            become_torchrun(request)
        print(pid, file=file, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=file, flush=True)
    os._exit(0)


def become_torchrun(request: dict[str, Any]) -> NoReturn:
    os.setsid()
    for number, (name, flags) in enumerate(
        [
            ("stdin", os.O_RDONLY),
            ("stdout", os.O_WRONLY | os.O_CREAT),
            ("stderr", os.O_WRONLY | os.O_CREAT),
        ]
    ):
        fd = os.open(request[name], flags | os.O_APPEND | os.O_NOCTTY, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.closerange(3, 100)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = [request["module"], *request["argv"]]
    sys.path[0] = request["cwd"]
    code = 0
    try:
        sys.modules[request["module"]].main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - told as the interpreter tells it
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])

"""The process that serves a generation's TCPStore; run by its path under the Python that the workers use.

    python -u store_server.py FD

FD is one end of a SOCK_SEQPACKET socketpair. Each packet, JSON {"generation": G} with one listening socket attached,
replaces the store that is served by a fresh one on that socket; the old one's clients are disconnected. A packet
without a socket only ends the old one. The answer is one packet: {"ready": G} or {"failed": G, "text": why}. The
process ends when the other side is gone. It goes on over generations: only the first one waits for torch to load.

Standard library and torch only: this file imports nothing of holdfast.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import socket
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKET_BYTES_MAX = 4096


def load_store_class() -> Any:
    """torch's TCPStore. It is loaded from torch's C library alone if that works, which takes a fifth of the time and
    less memory. Raises ImportError when there is no torch.
    """
    if "torch" in sys.modules:  # forked from the fork server
        return importlib.import_module("torch.distributed").TCPStore
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError(f"{sys.executable} has no torch, which serves the store")
    if os.environ.get("HOLDFAST_STORE_FULL_TORCH") != "1":
        try:
            return _load_c_library_alone(spec)
        except Exception:  # noqa: BLE001 - an unknown version: import torch the ordinary way, in a fresh process
            os.environ["HOLDFAST_STORE_FULL_TORCH"] = "1"
            os.execv(sys.executable, [sys.executable, "-u", *sys.argv])
    from torch.distributed import TCPStore

    return TCPStore


def _load_c_library_alone(spec: ModuleSpec) -> Any:
    folder = os.path.dirname(str(spec.origin))
    # Empty packages instead of torch's, so that the import of the C library inside does not run torch/__init__.py.
    for name, path in (("torch", [folder]), ("torch.distributed", [])):
        package = ModuleType(name)
        package.__path__ = path
        sys.modules[name] = package
    globals_library = os.path.join(folder, "lib", "libtorch_global_deps.so")
    ctypes.CDLL(globals_library, mode=ctypes.RTLD_GLOBAL)
    library: Any = importlib.import_module("torch._C")
    library._c10d_init()
    return importlib.import_module("torch._C._distributed_c10d").TCPStore


def serve(control: socket.socket) -> None:
    """Handle one packet after the other until the other side is gone."""
    store_class: Any = None
    served: list[Any] = []
    fault = ""
    try:
        store_class = load_store_class()
    except Exception as error:  # noqa: BLE001 - whatever it is, the agent gets it as the answer
        fault = f"{type(error).__name__}: {error}"
    while True:
        data, fds, _flags, _address = socket.recv_fds(control, PACKET_BYTES_MAX, 1)
        if not data:
            return
        served.clear()  # ends the old store: its clients are disconnected and its socket is closed
        if not fds:
            continue
        if store_class is not None:
            try:
                served.append(open_store(store_class, fds[0]))
                fault = ""
            except Exception as error:  # noqa: BLE001 - as above
                fault = f"{type(error).__name__}: {error}"
        generation = json.loads(data)["generation"]
        answer = {"failed": generation, "text": fault.partition("\n")[0]} if fault else {"ready": generation}
        control.sendall(json.dumps(answer).encode())


def open_store(store_class: Any, fd: int) -> Any:
    """A store on a socket that already listens, and that the store owns from now on. `store_class`: torch's."""
    with socket.socket(fileno=os.dup(fd)) as listening:
        port = listening.getsockname()[1]
        host = "127.0.0.1" if listening.family == socket.AF_INET else "localhost"
    given = {"is_master": True, "wait_for_workers": False, "master_listen_fd": fd}
    try:
        return store_class(host, port, **given)
    except NotImplementedError:
        # torch 2.6: the store of libuv can be given no socket. The older one can, and serves the same clients.
        return store_class(host, port, **given, use_libuv=False)


if __name__ == "__main__":
    del sys.path[0]  # our folder: its files must not hide modules with the same names
    serve(socket.socket(fileno=int(sys.argv[1])))

"""holdfast launches distributed training and keeps it going.

Importing the package is cheap: a public name loads its module on first use (PEP 562).

    holdfast.launch(fn, *args, nproc=2)   run a function in worker processes; its results by rank
    holdfast.record                       decorator for programs that no launcher's bootstrap runs
    holdfast.HoldfastError                root of every error; WorkerFailedError and LaunchTimeoutError are two of them
"""

from __future__ import annotations

from holdfast.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from holdfast.launching.api import launch
    from holdfast.protocol.errors import HoldfastError, LaunchTimeoutError, WorkerFailedError
    from holdfast.worker.record import record

__all__ = ["HoldfastError", "LaunchTimeoutError", "WorkerFailedError", "__version__", "launch", "record"]

_HOMES = {
    "HoldfastError": "holdfast.protocol.errors",
    "LaunchTimeoutError": "holdfast.protocol.errors",
    "WorkerFailedError": "holdfast.protocol.errors",
    "launch": "holdfast.launching.api",
    "record": "holdfast.worker.record",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""What a test may change in its process and the next test must not see: environment, folder, file mask, signal handlers.

A test that passes alone and fails after another one mostly fails by one of these. Libraries change them as well: torch
sets the folder of its compiler's cache in the process that compiles.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

PYTEST_OWN = ("PYTEST_", "COV_", "COVERAGE_")
"""Variables of this beginning change with each test."""


@dataclass(frozen=True)
class Surroundings:
    environment: dict[str, str]
    folder: str
    mask: str
    """As the kernel shows it: to ask by `os.umask` would change it for the other threads."""
    handlers: dict[signal.Signals, Any]

    @classmethod
    def now(cls) -> Surroundings:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PYTEST_OWN)}
        with open("/proc/self/status") as file:
            mask = next(line.split()[1] for line in file if line.startswith("Umask:"))
        handlers = {each: signal.getsignal(each) for each in signal.Signals}
        return cls(environment, os.getcwd(), mask, handlers)

    def restore(self) -> None:
        """For the main thread."""
        for name in [name for name in os.environ if name not in self.environment and not name.startswith(PYTEST_OWN)]:
            del os.environ[name]
        for name, value in self.environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        os.chdir(self.folder)
        os.umask(int(self.mask, 8))
        for number, handler in self.handlers.items():
            # None: it was set by C code, and Python cannot set it again.
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)

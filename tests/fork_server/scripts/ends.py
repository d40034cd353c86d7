"""Imports the modules that the arguments name, then has a child end in each way in which a program can."""

import importlib
import os
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)


def faulty(*_: object) -> None:
    raise RuntimeError("in the hook")


def fails_to_report() -> None:
    sys.excepthook = faulty
    raise ValueError("boom")


def raises() -> None:
    raise ValueError("boom")


def is_interrupted() -> None:
    raise KeyboardInterrupt


for end in (lambda: None, lambda: sys.exit(3), raises, is_interrupted, fails_to_report):
    child = os.fork()
    if child == 0:
        end()
        break
    os.waitpid(child, 0)

"""`record`: writes the exception that leaves a function to the launcher's error file, as torchelastic's does.

Scripts do not need it under holdfast, whose bootstrap records the exception that ends the program. It is for programs
that are started in other ways, and replaces `torch.distributed.elastic.multiprocessing.errors.record` without torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import shutil
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from holdfast.worker.bootstrap import ERROR_FILE, write_error_file

P = ParamSpec("P")
R = TypeVar("R")


@overload
def record(function: Callable[P, R], /) -> Callable[P, R | None]: ...
@overload
def record() -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
def record(function: Callable[P, R] | None = None, /) -> Any:
    """Decorate a program's main function; `@record` and `@record()` are the same.

    An Exception is written to $TORCHELASTIC_ERROR_FILE, if that is set and not empty, and propagates. SystemExit(0)
    becomes a return of None; any other SystemExit and KeyboardInterrupt propagate unrecorded.
    """
    if function is None:
        return record

    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        _enable_faulthandler()
        try:
            return function(*args, **kwargs)
        except SystemExit as end:
            if end.code == 0:
                return None
            raise
        except Exception as error:
            path = os.environ.get(ERROR_FILE)
            if path:
                _record(path, error)
            raise

    return recorded


def _enable_faulthandler() -> None:
    with contextlib.suppress(OSError, RuntimeError, ValueError, AttributeError):  # no usable stderr
        faulthandler.enable(all_threads=True)


def _record(path: str, error: Exception) -> None:
    try:
        first_failure = getattr(error, "get_first_failure", None)
        if first_failure is None:
            write_error_file(path, error, traceback.format_exc())
        else:
            _pass_on(first_failure()[1], path)
    except (OSError, ValueError) as trouble:
        error.add_note(f"(the error file {path} could not be written: {trouble})")


def _pass_on(failure: Any, path: str) -> None:
    """A launcher inside the program failed (torch's ChildFailedError): copy its worker's error file to ours, with its
    exit code."""
    if not os.path.isfile(failure.error_file):
        return
    shutil.copyfile(failure.error_file, path)
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    if failure.exitcode and isinstance(data.get("message"), dict):
        data["message"]["errorCode"] = failure.exitcode
        with open(path, "w", encoding="utf-8") as file:
            json.dump(data, file)

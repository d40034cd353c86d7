"""The call and the answers of the workers, pickled in memory files that only this job's processes inherit.

Knows cloudpickle and the format of worker/call.py; knows nothing of processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from holdfast.core.errors import InternalError, MissingPackageError, PicklingError
from holdfast.worker.call import ERROR, HEADER, NOTHING, TEXT_LENGTH, VALUE

PROTOCOL = 5


class RemoteTracebackError(Exception):
    """The traceback of an exception in another process, as text: the cause of that exception here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text.rstrip()}\n"""'


class Answered(NamedTuple):
    """What one worker left. Neither value nor error: it ended without a word."""

    rank: int
    pid: int
    has_value: bool
    value: Any = None
    error: BaseException | None = None


def memory_file(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)


# --- the call ---------------------------------------------------------------------------------------------------------


def write_call(fd: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Raises MissingPackageError without cloudpickle, PicklingError naming what cannot be pickled."""
    try:
        import cloudpickle
    except ImportError as error:
        raise MissingPackageError("holdfast.launch needs cloudpickle: pip install 'holdfast[python]'") from error
    with os.fdopen(os.dup(fd), "wb") as file, _carried_along(function, cloudpickle):
        pickle.dump((sys.path, sys.argv), file, protocol=PROTOCOL)
        try:
            cloudpickle.dump((function, arguments), file, protocol=PROTOCOL)
        except Exception as error:
            culprit = _unpicklable(function, arguments, cloudpickle)
            raise PicklingError(f"{culprit} cannot be pickled: {type(error).__name__}: {error}") from error


def _unpicklable(function: Callable[..., Any], arguments: tuple[Any, ...], cloudpickle: ModuleType) -> str:
    for index, argument in enumerate(arguments):
        try:
            cloudpickle.dumps(argument, protocol=PROTOCOL)
        except Exception:  # noqa: BLE001 - whatever its own __reduce__ raises
            return f"argument {index} of the function ({type(argument).__qualname__})"
    return f"the function {getattr(function, '__qualname__', repr(function))} (or what it refers to)"


@contextlib.contextmanager
def _carried_along(function: Callable[..., Any], cloudpickle: ModuleType) -> Iterator[None]:
    """A module that the workers could not import by the same path (a test's, an editor's) travels with the function."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__module__", None) or "__main__"
    module = sys.modules.get(name)
    if name == "__main__" or module is None or _can_be_imported(name):
        yield  # cloudpickle takes __main__ along of itself
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # another thread was as fast
            cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(name: str) -> bool:
    """Whether a fresh process with our path would find the module: sys.modules does not count."""
    path: Any = None
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        parent = ".".join(parts[:length])
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for finder in finders if (spec := finder.find_spec(parent, path))), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


# --- the answers ------------------------------------------------------------------------------------------------------


def read_answer(fd: int) -> Answered | None:
    """What a worker left; None when it did not come so far as to begin. Raises PicklingError for a value that does not load."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            return None
        kind, rank, pid, length = HEADER.unpack(head)
        if kind == NOTHING:
            return Answered(rank, pid, has_value=False)
        if kind == VALUE:
            try:
                return Answered(rank, pid, has_value=True, value=pickle.load(file))
            except Exception as error:
                text = f"the result of rank {rank} cannot be unpickled: {type(error).__name__}: {error}"
                raise PicklingError(text) from error
        if kind == ERROR:
            return Answered(rank, pid, has_value=False, error=_read_error(file.read(length)))
    raise InternalError(f"a worker's answer is of the unknown kind {kind!r}")


def _read_error(body: bytes) -> BaseException:
    """The exception itself, caused by its remote traceback; that alone when it does not unpickle."""
    (length,) = TEXT_LENGTH.unpack_from(body)
    text = body[TEXT_LENGTH.size : TEXT_LENGTH.size + length].decode()
    told = RemoteTracebackError(text)
    try:
        error = pickle.loads(body[TEXT_LENGTH.size + length :])
    except Exception:  # noqa: BLE001 - an empty text, or whatever its own constructor raises
        return told
    if not isinstance(error, BaseException):
        return told
    error.__cause__ = told
    return error

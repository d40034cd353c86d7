"""The program of a worker that runs a function: reads the call, makes it, writes its result.

    bootstrap.py script call.py        descriptor 3: the call, 4: the answer, both memory files of the launching process

Run by its path under the bootstrap, so it uses the standard library only, and nothing of holdfast. The pickled call
comes from the process that launched us, through inherited memory: never from a network or a named file.

The answer is a header (HEADER), which is written last, and a body by its kind: NOTHING; VALUE: the pickled value;
ERROR: 4 bytes of length, then the traceback in UTF-8, then the pickled exception, or nothing if it does not pickle.
"""

from __future__ import annotations

import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

CALL_FD, RESULT_FD = 3, 4
HEADER = struct.Struct(">cIIQ")
"""Layout of the header: kind, rank, process id, length of the body."""
TEXT_LENGTH = struct.Struct(">I")
NOTHING, VALUE, ERROR = b"N", b"V", b"E"
"""The kinds of answers. NOTHING stays if the worker ends before it has a result."""


class ResultFile:
    """The result file of this worker, in memory. A restarted worker gets the same file, so it is emptied first."""

    def __init__(self, fd: int) -> None:
        # Opened a second time: so it has an offset of its own, and the function's children do not inherit it.
        self._file: BinaryIO = open(f"/proc/self/fd/{fd}", "r+b")  # noqa: SIM115 - until the process ends
        os.close(fd)
        self._file.truncate(0)
        self._write_header(NOTHING)

    def value(self, value: Any) -> None:
        """Write the function's result. Raises TypeError, naming the value's type, when it cannot be pickled."""
        import cloudpickle

        self._file.seek(HEADER.size)
        try:
            cloudpickle.dump(value, self._file, protocol=5)
        except Exception as error:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise TypeError(
                f"the result of rank {os.environ['RANK']} ({kind}) cannot be pickled: {_describe(error)}"
            ) from error
        self._write_header(VALUE)

    def error(self, error: BaseException, text: str) -> None:
        """Write an exception. Never raises: an exception that does not pickle is written as its text alone."""
        import cloudpickle

        encoded = text.encode(errors="backslashreplace")
        try:
            pickled = cloudpickle.dumps(error, protocol=5)
        except Exception:  # noqa: BLE001 - the exception's own __reduce__ may raise anything
            pickled = b""
        self._file.seek(HEADER.size)
        self._file.write(TEXT_LENGTH.pack(len(encoded)) + encoded + pickled)
        self._write_header(ERROR)

    def _write_header(self, kind: bytes) -> None:
        """Write the header, after everything that it announces."""
        self._file.flush()
        length = max(self._file.tell() - HEADER.size, 0)
        os.pwrite(self._file.fileno(), HEADER.pack(kind, int(os.environ["RANK"]), os.getpid(), length), 0)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def read_call(fd: int) -> tuple[Any, tuple[Any, ...]]:
    """Take over the launching process's module path and arguments, then load its function and theirs."""
    import pickle

    with open(f"/proc/self/fd/{fd}", "rb") as file:  # a second time: the other workers share the inherited offset
        os.close(fd)
        sys.path[:], sys.argv[:] = pickle.load(file)  # first, so that the function's modules are found
        function, arguments = pickle.load(file)
    return function, arguments


def main() -> None:
    """Make the call. The bootstrap records and shows its exception as any script's."""
    answer = ResultFile(RESULT_FD)
    try:
        function, arguments = read_call(CALL_FD)
        answer.value(function(*arguments))
    except Exception as error:
        import traceback

        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this frame
        answer.error(error, "".join(traceback.format_exception(type(error), error, trace)))
        raise


if __name__ == "__main__":
    main()

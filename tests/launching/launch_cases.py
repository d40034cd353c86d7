"""Functions for tests of holdfast.launch. Imported by the tests; workers get them by value or by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, NoReturn


class CustomError(Exception):
    """Survives the way back."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message, number)
        self.number = number


class UnloadableError(Exception):
    """Pickles, but its constructor wants more than it gets back."""

    def __init__(self, first: str, *, second: str) -> None:
        super().__init__(f"{first} and {second}")


def rank() -> int:
    return int(os.environ["RANK"])


def wait_for_the_end() -> NoReturn:
    """Until this process is killed."""
    while True:
        signal.pause()


def echo(value: Any) -> tuple[int, Any]:
    return rank(), value


def environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def raise_custom(culprit: int) -> None:
    if rank() == culprit:
        raise CustomError("the loss is a pineapple", 7)
    wait_for_the_end()


def raise_unloadable() -> None:
    raise UnloadableError("one", second="two")


def raise_unpicklable() -> None:
    error = ValueError("holds a generator")
    error.generator = (x for x in ())  # type: ignore[attr-defined]
    raise error


def leave(culprit: int, code: int) -> None:
    if rank() == culprit:
        os._exit(code)
    wait_for_the_end()


def exit_early() -> None:
    raise SystemExit(0)


def fail_once() -> int:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and rank() == 1:
        raise CustomError("only once", 1)
    if attempt == 0:
        wait_for_the_end()
    return attempt


def generator() -> Any:
    return (x for x in ())


def large(size: int) -> bytes:
    return bytes([rank()]) * size


def say(text: str) -> None:
    print(text)


def sleep_and_tell(folder: str, *, stubborn: str = "") -> None:
    """Leaves a file named after its process id, then waits to be stopped; does no more than touch `stubborn` then."""
    if stubborn:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: Path(stubborn).touch())
    Path(folder, str(os.getpid())).touch()
    wait_for_the_end()


def nested(ranks: int) -> dict[int, tuple[int, Any]]:
    import holdfast

    return holdfast.launch(echo, "inner", nproc=ranks)


def all_reduce() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.full((1,), float(rank() + 1))
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return float(ones.item())

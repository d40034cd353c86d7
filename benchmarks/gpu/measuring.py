"""What the parts share: notes of what they measure, jobs that they launch, stamps of ranks, and the device's memory.

Runs in the process of a part, where everything is installed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from benchmarks.gpu.campaign import NOT_HERE

# A process without a campaign around it (a try by hand) has its own defaults.
DEVICE = os.environ.get("GPU_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
FOLDER = Path(os.environ.get("GPU_FOLDER", "/tmp"))
END_S = float(os.environ.get("GPU_END", "inf"))
SCRIPTS = Path(__file__).resolve().parent / "scripts"
POLL_S = 0.01
REPORT_S = 4.0
"""A part that waits for a job gives up so long before its deadline: then it can say what the job has printed."""
NEVER_S = 1e6
LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "holdfast": (sys.executable, "-m", "holdfast.run"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
}
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun restarts with it only: see the row `recovery` of the benchmarks."""

T = TypeVar("T")

faulthandler.register(signal.SIGUSR1, all_threads=True)


def note(name: str, value: float, unit: str = "") -> None:
    """Write a figure down at once: a hang that follows does not cost it."""
    _write({"name": name, "value": float(value), "unit": unit})


def say(name: str, text: object) -> None:
    """Write a text down."""
    _write({"name": name, "text": str(text)})


def _write(line: Mapping[str, object]) -> None:
    print(line, flush=True)
    if path := os.environ.get("GPU_NOTES"):
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def not_here(reason: str) -> NoReturn:
    """End the part: this machine cannot run it."""
    say("reason", reason)
    sys.exit(NOT_HERE)


def left_s() -> float:
    """The time until the part's deadline."""
    return END_S - time.monotonic()


class Job:
    """A launcher that runs a script of ours, with a folder of its own in which its ranks leave stamps."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, began_s: float) -> None:
        self.process, self.folder, self.began_s = process, folder, began_s

    def stamps(self, name: str) -> dict[str, float]:
        """What the ranks left as `name.KEY`, by this key: a time (monotonic s) or another number."""
        return {path.name.partition(".")[2]: float(path.read_text()) for path in self.folder.glob(f"{name}.*")}

    def await_stamps(self, name: str, count: int) -> dict[str, float]:
        """Wait for so many. Raises RuntimeError if the job ends first."""
        return self.until(lambda: found if len(found := self.stamps(name)) >= count else None, f"{count} {name}")

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        """Wait for a value that is not None, or is true. Raises RuntimeError a moment before the part's deadline."""
        while not (found := condition()):
            if left_s() < REPORT_S:
                raise RuntimeError(f"no {what} within the part's time\n{self.tail()}")
            if self.process.poll() is not None and not (found := condition()):
                raise RuntimeError(f"ended with {self.process.returncode} before {what}\n{self.tail()}")
            if found:
                break
            time.sleep(POLL_S)
        return found

    def end(self) -> None:
        """Wait for the job's end. Raises RuntimeError unless its exit code is 0."""
        try:
            code = self.process.wait(min(max(0.0, left_s() - REPORT_S), NEVER_S))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no end within the part's time\n{self.tail()}") from None
        if code != 0:
            raise RuntimeError(f"exit code {code}\n{self.tail()}")

    def tail(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")[-2000:]


@contextlib.contextmanager
def launched(
    launcher: str, flags: Sequence[str], script: str, *arguments: object, extra: Mapping[str, str] | None = None
) -> Iterator[Job]:
    """This launcher on a script of ours. What is left of it at the block's end is killed."""
    number = len(list(FOLDER.glob("job*")))
    folder = FOLDER / f"job{number}"
    folder.mkdir()
    environ = {
        **os.environ,
        "GPU_OUT": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        **OWN_STORE,
        **(extra or {}),
    }
    with (folder / "output.txt").open("wb") as output:
        began_s = time.monotonic()
        line = [*LAUNCHERS[launcher], *flags, str(SCRIPTS / script), *map(str, arguments)]
        process = subprocess.Popen(line, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield Job(process, folder, began_s)
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(20.0, max(0.0, left_s() - REPORT_S / 2)))
            process.kill()
            process.wait()


def gpu_memory() -> tuple[int, list[int]]:
    """Bytes in use on the first GPU, and the ids of the processes that use it."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        return used, [each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    finally:
        pynvml.nvmlShutdown()

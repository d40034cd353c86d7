"""Programs that share an import of torch: one process has imported it and its compiler, and programs are forked from it.

These imports take most of the processor time of a program that trains for a moment. A program runs as `__main__`, with
arguments, environment, folder and streams of its own, and ends as warm_program.py says.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    import warm_program
else:
    from tests.support import processor_time
    from tests.support.gloo_lines import without_gloo_lines
    from tests.support.limits import limit_s

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.utils.checkpoint",
)
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
"""OpenMP reads it once: what runs here has one thread, whatever its own environment says. Nothing is looked up in a
network."""
START_S_MAX = 100.0


class Warm:
    """The parent, as a test sees it. One program at a time.

    It is no child of the test's process: tests in which that stands for an agent end all its children.
    """

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        environment = {**os.environ, **ON_CPU}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=pipe, stdout=pipe, bufsize=0, env=environment, cwd="/"
        )
        self._process.wait()  # it has forked the one that we talk to

    def run(
        self,
        line: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 100.0,
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run([sys.executable, *line], capture_output=True, text=True, …). The environment is ours
        unless it is given."""
        arguments = [str(each) for each in line]
        with tempfile.TemporaryDirectory() as name:
            streams = [f"{name}/out", f"{name}/err"]
            order = {
                "arguments": arguments,
                "environment": dict(os.environ if env is None else env),
                "folder": os.path.abspath(cwd or "."),
                "streams": streams,
            }
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
            except BrokenPipeError:
                raise AssertionError("the parent of all programs has ended") from None
            started = self._answer(START_S_MAX)
            assert started is not None, "no program was forked"
            ended = self._answer(timeout)
            if ended is None:
                os.killpg(started["pid"], signal.SIGKILL)
                self._answer(START_S_MAX)
            out, err = (Path(each).read_text(errors="replace") for each in streams)
        story = f"{arguments}\n--- stdout\n{out}\n--- stderr\n{err}"
        assert ended is not None, f"no end within {limit_s(timeout)} s: {story}"
        processor_time.add(ended["processor_s"])
        return subprocess.CompletedProcess(arguments, ended["code"], without_gloo_lines(out), err)

    def found(self, *line: str | Path, timeout: float = 110.0) -> Any:
        """The JSON that a script prints. pytest shows its other output if the test fails."""
        done = self.run(line, timeout=timeout)
        print(done.stderr[-3000:], file=sys.stderr)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    def _answer(self, timeout: float) -> dict[str, Any] | None:
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], limit_s(timeout))
        return dict(json.loads(stdout.readline())) if readable else None

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def serve() -> None:
    """Fork a program for each line that comes; answer with its pid, then with its exit code and processor time."""
    if os.fork():
        os._exit(0)
    os.setsid()
    gc.disable()  # a fifth of the time of torch's import
    for name in MODULES:
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # else each program's first collection copies every page that it looks at
    atexit.register(gc.unfreeze)  # libraries print what the interpreter cannot free in the end
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False  # torch.library has 170, and takes 30 ms for them at the end of each program
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become(**json.loads(line))
        answer(pid=pid)
        _, status, usage = os.wait4(pid, 0)
        answer(code=os.waitstatus_to_exitcode(status), processor_s=usage.ru_utime + usage.ru_stime)


def answer(**what: float) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def become(arguments: list[str], environment: dict[str, str], folder: str, streams: list[str]) -> NoReturn:
    os.setsid()
    for fd, path in enumerate(("/dev/null", *streams)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, fd)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = arguments
    warm_program.run(arguments[0])


if __name__ == "__main__":
    serve()

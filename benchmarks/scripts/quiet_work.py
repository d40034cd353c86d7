"""Three DDP ranks on gloo that work for long without a step, and do not hang.

    quiet_work.py RANK SECONDS_OF_ALL SECONDS_OF_ONE KIND...

Between stretches of training the works of these kinds are done in turn, until SECONDS_OF_ALL have passed, or once if that
is 0. Works that all ranks do together stand at the beginning of a job, or take the place of its training.
"""

from __future__ import annotations

import http.server
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from training import WIDTH, Job, batches, begin, train

TRAIN_STEPS = 60
CHUNK_BYTES = 1 << 20
TRICKLE_BYTES = 8 << 10
"""In each of the pieces in which a slow download comes."""
TRICKLE_S = 0.5
READ_STEPS = 5

BUSY = "import time\nend = time.monotonic() + float(__import__('sys').argv[1])\nwhile time.monotonic() < end: sum(range(9999))"
WRITES = """
import os, sys, time
end = time.monotonic() + float(sys.argv[1])
with open(sys.argv[2], 'wb') as file:
    while time.monotonic() < end:
        file.write(bytes(1 << 17)); file.flush(); file.seek(0); time.sleep(0.5)
"""

# --- one rank works, the others wait for it ---------------------------------------------------------------------------


def child_computes(job: Job, seconds: float) -> None:
    subprocess.run([sys.executable, "-c", BUSY, str(seconds)], check=True)


def child_writes(job: Job, seconds: float) -> None:
    subprocess.run([sys.executable, "-c", WRITES, str(seconds), str(job.folder / "copied")], check=True)


def orphan_computes(job: Job, seconds: float) -> None:
    """A process whose parent is gone, in a session of its own; its result is polled for."""
    done = job.folder / "orphan.done"
    done.unlink(missing_ok=True)
    code = f"{BUSY}\nopen(__import__('sys').argv[2], 'w').close()"
    begins = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-c", begins, sys.executable, "-c", code, str(seconds), str(done)], check=True)
    while not done.exists():
        time.sleep(0.2)


def numpy_in_one_call(job: Job, seconds: float) -> None:
    matrix = numpy.random.default_rng(0).standard_normal((300, 300))
    began_s = time.monotonic()
    numpy.linalg.svd(matrix)
    numpy.linalg.svd(numpy.stack([matrix] * int(seconds / (time.monotonic() - began_s))))


def torch_in_one_call(job: Job, seconds: float) -> None:
    matrix = torch.randn(200, 200)
    began_s = time.monotonic()
    torch.linalg.svd(matrix)
    torch.linalg.svd(matrix.expand(int(seconds / (time.monotonic() - began_s)), -1, -1))


def thread_computes(job: Job, seconds: float) -> None:
    thread = threading.Thread(target=count_words, args=(seconds,))
    thread.start()
    thread.join()


def checkpoint(job: Job, seconds: float) -> None:
    """Brought to the disk piece by piece."""
    end_s = time.monotonic() + seconds
    with open(job.folder / "model.pt", "wb") as file:
        while time.monotonic() < end_s:
            file.write(os.urandom(CHUNK_BYTES))
            os.fsync(file.fileno())
            file.seek(0)
            time.sleep(0.2)


def evaluation(job: Job, seconds: float) -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])
    end_s = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < end_s:
            net(torch.randn(64, 256))
            time.sleep(0.02)


def download(job: Job, seconds: float) -> None:
    with urllib.request.urlopen(url(job, seconds)) as answer:
        answer.read()


def download_into_a_file(job: Job, seconds: float) -> None:
    urllib.request.urlretrieve(url(job, seconds), job.folder / "weights")


def url(job: Job, seconds: float) -> str:
    return f"http://127.0.0.1:{(job.folder / 'port').read_text()}/{seconds}"


class Trickle(http.server.BaseHTTPRequestHandler):
    """Sends a little, again and again, for as many seconds as the path says."""

    def do_GET(self) -> None:
        count = int(float(self.path.strip("/")) / TRICKLE_S)
        self.send_response(200)
        self.send_header("Content-Length", str(count * TRICKLE_BYTES))
        self.end_headers()
        for _ in range(count):
            self.wfile.write(bytes(TRICKLE_BYTES))
            time.sleep(TRICKLE_S)

    def log_message(self, *_: object) -> None:
        pass


def serve(job: Job) -> None:
    """In a rank that waits for the odd one: nothing about the odd one itself shows that bytes are sent."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trickle)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (job.folder / "port").write_text(str(server.server_address[1]))


def tokenize(job: Job, seconds: float) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(count_words, [seconds / 4] * 8, chunksize=1)


def count_words(seconds: float) -> int:
    end_s, words = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        words += len(("a sentence of words " * 100).split())
    return words


SOURCE = '#include <regex>\n#include <map>\n#include <iostream>\nint main() { std::regex r("a+"); return 0; }\n'


def compilation(job: Job, seconds: float) -> None:
    """Short processes, one after the other."""
    source = job.folder / "kernel.cpp"
    source.write_text(SOURCE)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        subprocess.run(["c++", "-O2", "-c", str(source), "-o", str(job.folder / "kernel.o")], check=True)


ALONE: tuple[Callable[[Job, float], None], ...] = (
    child_computes, child_writes, orphan_computes, numpy_in_one_call, torch_in_one_call, thread_computes, checkpoint,
    evaluation, download, download_into_a_file, tokenize, compilation,
)  # fmt: skip

# --- all ranks work, together -----------------------------------------------------------------------------------------


def all_evaluate(job: Job, seconds: float) -> None:
    evaluation(job, seconds)


def all_sleep(job: Job, seconds: float) -> None:
    time.sleep(seconds)


def compute(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        torch.randn(128, 128).matmul(torch.randn(128, 128))


def long_steps(job: Job, seconds: float) -> None:
    def data() -> Iterator[torch.Tensor]:
        for _ in range(3):
            compute(seconds / 3)
            yield torch.randn(4, WIDTH)

    train(job, data())


def accumulation(job: Job, seconds: float) -> None:
    """Gradients, and no step of the optimizer."""
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    end_s = time.monotonic() + seconds
    with model.no_sync():
        while time.monotonic() < end_s:
            model(torch.randn(256, WIDTH)).sum().backward()
            time.sleep(0.02)


def warm_up(job: Job, seconds: float) -> None:
    """Collectives, and no optimizer."""
    go_on, end_s = torch.ones(1), time.monotonic() + seconds
    while go_on.item():
        compute(0.05)
        go_on = torch.tensor([float(time.monotonic() < end_s)])
        dist.broadcast(go_on, 0)


class Shards(IterableDataset[torch.Tensor]):
    """Reads for long before it has a first item."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._seconds = seconds

    def __iter__(self) -> Iterator[torch.Tensor]:
        end_s = time.monotonic() + self._seconds
        while time.monotonic() < end_s:
            self._path.read_bytes()
            time.sleep(0.2)
        for _ in range(READ_STEPS):
            yield torch.randn(WIDTH)


def first_batch(job: Job, seconds: float) -> None:
    path = job.folder / f"shard{job.rank}"
    path.write_bytes(bytes(CHUNK_BYTES))
    train(job, DataLoader(Shards(path, seconds), num_workers=1))


TOGETHER: tuple[Callable[[Job, float], None], ...] = (
    all_evaluate, all_sleep, long_steps, accumulation, warm_up, first_batch,
)  # fmt: skip
UNTRAINED = (long_steps, warm_up, first_batch)
"""They are the first thing that a job does."""


def main() -> None:
    job, whole_s, each_s, names = Job(int(sys.argv[1])), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    works = [next(work for work in ALONE + TOGETHER if work.__name__ == name) for name in names]
    begin()
    if job.rank == (job.odd_rank + 1) % job.world:
        serve(job)
    began_s = time.monotonic()
    for number, work in enumerate(itertools.cycle(works)):
        if work not in UNTRAINED:
            train(job, batches(TRAIN_STEPS))
        if job.odd or work in TOGETHER:
            work(job, each_s)
        dist.barrier()
        over = torch.tensor([float(time.monotonic() - began_s >= whole_s and number + 1 >= len(works))])
        dist.broadcast(over, 0)
        if over.item():
            return


if __name__ == "__main__":
    main()

"""What programs do with processes, threads and compilers; prints one line each, the same however it was started."""

import concurrent.futures
import cProfile
import ctypes
import faulthandler
import io
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import tracemalloc
import warnings

if __name__ == "__main__":  # a child that is spawned imports this file, and torch only if it needs it
    import numpy as np
    import torch
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.data import DataLoader


def square(number):
    return number * number


class Numbers:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        import torch

        info = torch.utils.data.get_worker_info()
        return torch.tensor([index, -1 if info is None else info.id, info.seed % 2 * 0])


def pools():
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(square, range(4)))
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        print("threads", list(threads.map(square, range(4))))
    queue = multiprocessing.Queue()
    child = multiprocessing.Process(target=queue.put, args=(os.getppid() > 1,))
    child.start()
    print("queue", queue.get(), child.join(), child.exitcode)


def loaders():
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    print("loader", [batch.tolist() for batch in loader])


def numbers():
    matrix = np.arange(250_000, dtype=np.float64).reshape(500, 500) % 7
    print("numpy", float((matrix @ matrix).sum()))
    tensor = torch.arange(250_000, dtype=torch.float64).reshape(500, 500) % 7
    tensor.requires_grad_()
    (tensor @ tensor).sum().backward()
    print("torch", float(tensor.grad.sum()), torch.get_num_threads())
    torch.manual_seed(3)
    print("seeded", torch.rand(2).tolist())


def profilers():
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.ones(4).add(1)
    print("profiler", any("add" in event.key for event in seen.key_averages()))
    python = cProfile.Profile()
    python.runcall(square, 3)
    print("cProfile", len(python.getstats()) > 0)
    tracemalloc.start()
    print("tracemalloc", tracemalloc.get_traced_memory()[1] >= 0)
    tracemalloc.stop()


def compilers():
    """Products of matrices alone: for them the compiler needs no C++, which would take most of the time here."""
    weight = torch.full((4, 4), 0.5, requires_grad=True)
    step = torch.compile(lambda x: x @ weight @ weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        result = step(torch.ones(3, 4))
        result.backward(torch.ones(3, 4))
        optimizer.step()
    print("compiled", result.sum().item())


def others():
    command = [sys.executable, "-c", "import os; print(os.environ['RANK'], len(os.listdir('/proc/self/fd')))"]
    print("child", subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    print("shell", subprocess.run("echo $RANK $LOCAL_RANK", shell=True, capture_output=True, text=True).stdout.strip())
    caught = io.StringIO()
    logging.basicConfig(stream=caught, format="%(name)s %(levelname)s %(processName)s %(message)s")
    logging.getLogger("mine").warning("hello")
    print("logging", caught.getvalue().strip())
    with warnings.catch_warnings(record=True) as told:
        warnings.warn("once", UserWarning, stacklevel=1)
    print("warning", [str(each.message) for each in told])
    dumped = os.memfd_create("dump")
    faulthandler.dump_traceback(dumped)
    os.lseek(dumped, 0, 0)
    frames = [line.rsplit("/", 1)[-1] for line in os.read(dumped, 4096).decode().splitlines() if "File" in line]
    print("faulthandler", [frame.partition('"')[0] for frame in frames])
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    print("getenv", libc.getenv(b"LOCAL_RANK"))
    timer = threading.Timer(0, print, ["timer"])
    timer.start()
    timer.join()


if __name__ == "__main__":
    pools()
    loaders()
    numbers()
    compilers()
    profilers()
    others()

"""A rank that does what its standard input says, until SIGUSR1 ends that; it says `doing`, and afterwards `ok`."""

import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
import without_compiler  # noqa: F401
from torch.utils.data import DataLoader, Dataset


class ReleasedError(Exception):
    pass


working = False


def release(*_):
    if working:  # a dead child may have released it already
        raise ReleasedError


class Stops(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGSTOP)
        return torch.zeros(1)


@contextlib.contextmanager
def metrics():
    """A thread that sends something now and then."""
    over = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(server.getsockname())
    receiver, _ = server.accept()

    def send():
        while not over.is_set():
            sender.sendall(bytes(300))
            receiver.recv(300)
            time.sleep(0.05)

    threading.Thread(target=send, daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextlib.contextmanager
def sampler():
    """A process that measures the machine again and again."""
    line = "import time\nwhile True: sum(range(300_000)); time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", line]) as process:
        try:
            yield
        finally:
            process.kill()


def event_and_metrics():
    with metrics():
        threading.Event().wait()


def silent_peer_and_metrics():
    server = socket.create_server(("127.0.0.1", 0))
    with metrics():
        socket.create_connection(server.getsockname()).recv(1)


def lock_and_sampler():
    lock = threading.Lock()
    with sampler(), lock:
        lock.acquire()


def ready():
    return False


def wait():
    time.sleep(0.05)


def loop_over_functions():
    while not ready():
        wait()


def refused():
    address = ("127.0.0.1", 1)
    while True:
        try:
            socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.02)


def read_shard():
    raise ValueError("shard 17 is corrupt")


def handles():
    try:
        read_shard()
    except ValueError:
        threading.Event().wait()


def polls_a_file():
    while not os.path.exists("result"):
        time.sleep(0.3)


def reduce():
    dist.all_reduce(torch.zeros(1))


def step():
    loss = model(torch.zeros(4, 8)).sum()
    loss.backward()
    optimizer.step()
    dist.all_reduce(torch.zeros(1))


def asleep():
    time.sleep(600)


def spin():
    while True:
        pass


def spin_over_two_lines():
    turns = 0
    while True:
        turns += 1
        turns -= 1


def regex():
    re.match(r"(a+)+$", "a" * 64 + "b")


def native():
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def loader():
    next(iter(DataLoader(Stops(), num_workers=1)))


def dead_queue():
    queue = multiprocessing.Queue()
    multiprocessing.get_context("fork").Process(target=os._exit, args=(1,)).start()
    queue.get()


def evaluate():
    network = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    with torch.no_grad():
        while True:
            network(torch.zeros(256, 256))


def barrier():
    dist.barrier()


dist.init_process_group("gloo")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
signal.signal(signal.SIGUSR1, release)
print("up", flush=True)
for line in sys.stdin:
    with contextlib.suppress(ReleasedError, RuntimeError):
        print("doing", flush=True)
        working = True
        globals()[line.strip()]()
    working = False
    print("ok", flush=True)

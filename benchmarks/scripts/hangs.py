"""Three DDP ranks on gloo, of which one hangs in the way that is asked for.

hangs.py KIND RANK
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import fcntl
import multiprocessing
import os
import pty
import queue
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.file_baton import FileBaton

from training import STEP_S, STEPS, WIDTH, Job, batches, begin, train

EVER_S = 1e6
FOR_EVER = f"import time; time.sleep({EVER_S})"

# --- one rank stays away from the collective: it does this in the middle of the training -----------------------------


def sleep(job: Job) -> None:
    time.sleep(EVER_S)


def spin(job: Job) -> None:
    count = 0
    while True:
        count += 1


def holds_interpreter(job: Job) -> None:
    ctypes.PyDLL(None).sleep(10**6)


def stopped(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def locks_in_turn(job: Job) -> None:
    first, second = threading.Lock(), threading.Lock()
    both_have = threading.Barrier(2)

    def other() -> None:
        with second:
            both_have.wait()
            with first:
                pass

    threading.Thread(target=other, daemon=True).start()
    with first:
        both_have.wait()
        with second:
            pass


def queue_without_producer(job: Job) -> None:
    items: queue.Queue[int] = queue.Queue()
    threading.Thread(target=lambda: items.put(1), daemon=True).start()
    items.get()
    items.get()


def event_never_set(job: Job) -> None:
    while not threading.Event().wait(5):
        pass


def executor_waits_for_itself(job: Job) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: pool.submit(int).result()).result()


def asks_the_user(job: Job) -> None:
    _, terminal = pty.openpty()
    sys.stdin = os.fdopen(terminal)
    input("Overwrite the checkpoint? ")


def silent_server() -> tuple[socket.socket, int]:
    server = socket.create_server(("127.0.0.1", 0))
    return server, server.getsockname()[1]


def server_never_answers(job: Job) -> None:
    _server, port = silent_server()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/weights.bin") as answer:
        answer.read()


def server_asked_again_and_again(job: Job) -> None:
    _server, port = silent_server()
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/weights.bin", timeout=4) as answer:
                answer.read()
                return
        except OSError:
            time.sleep(1)


def server_refuses(job: Job) -> None:
    """A retry loop with a growing pause."""
    server, port = silent_server()
    server.close()
    pause_s = 0.1
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)):
                return
        except OSError:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)


def child_sleeps(job: Job) -> None:
    subprocess.run([sys.executable, "-c", FOR_EVER], check=True)


def child_stopped(job: Job) -> None:
    subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 19)"], check=True)


def child_waits_for_us(job: Job) -> None:
    """Its output is full, and is read only when it has ended."""
    code = "import sys; sys.stdout.write('x' * 10**6)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.wait()


def print_into_a_full_pipe(job: Job) -> None:
    with subprocess.Popen([sys.executable, "-c", FOR_EVER], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        while True:
            process.stdin.write(b"loss 0.1\n" * 1000)


def joined_process_sleeps(job: Job) -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(EVER_S,), daemon=True)
    process.start()
    process.join()


def pool_lost_a_task(job: Job) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.map(kill_yourself, [1])


def kill_yourself(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def file_locked(job: Job) -> None:
    """By another process, which waits too."""
    path = str(job.folder / "lock")
    with open(path, "w") as mine, open(path) as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        fcntl.flock(mine, fcntl.LOCK_EX)


def database_locked(job: Job) -> None:
    path = job.folder / "runs.sqlite"
    with sqlite3.connect(path) as one, sqlite3.connect(path, timeout=EVER_S) as other:
        one.execute("BEGIN EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")


def pipe_without_writer(job: Job) -> None:
    path = job.folder / "shard.fifo"
    os.mkfifo(path)
    path.read_bytes()


def polls_for_a_file(job: Job) -> None:
    while not os.path.exists(job.folder / "never"):
        time.sleep(0.1)


def polls_in_functions(job: Job) -> None:
    wait_until(lambda: is_complete(job))


def wait_until(there: Callable[[], bool]) -> None:
    while not there():
        pause()


def is_complete(job: Job) -> bool:
    return all((job.folder / f"part{part}").is_file() for part in range(4))


def pause() -> None:
    time.sleep(0.2)


def stale_lock_of_a_build(job: Job) -> None:
    """As torch's extensions leave it behind when their compilation was killed."""
    path = job.folder / "build.lock"
    path.touch()
    FileBaton(str(path)).wait()


def await_for_ever(job: Job) -> None:
    async def answer() -> None:
        await asyncio.get_running_loop().create_future()

    asyncio.run(answer())


def waits_for_a_signal(job: Job) -> None:
    signal.pause()


# --- one rank communicates where the others do not -------------------------------------------------------------------


def barrier_of_one(job: Job) -> None:
    dist.barrier()


def object_of_one(job: Job) -> None:
    dist.broadcast_object_list([None], src=(job.rank + 1) % job.world)


def barrier_in_finally(job: Job) -> None:
    try:
        int("a bad sample")
    except ValueError:
        pass
    finally:
        dist.barrier()


def key_that_nobody_sets(job: Job) -> None:
    dist.distributed_c10d._get_default_store().get("never")


def key_that_is_waited_for(job: Job) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.wait(["never"])


def recv_without_send(job: Job) -> None:
    dist.recv(torch.empty(3), src=(job.rank + 1) % job.world)


def new_group_of_all_by_one(job: Job) -> None:
    dist.new_group()


IN_THE_MIDDLE: tuple[Callable[[Job], None], ...] = (
    sleep, spin, holds_interpreter, stopped, locks_in_turn, queue_without_producer, event_never_set,
    executor_waits_for_itself, asks_the_user, server_never_answers, server_asked_again_and_again, server_refuses,
    child_sleeps, child_stopped, child_waits_for_us, print_into_a_full_pipe, joined_process_sleeps, pool_lost_a_task,
    file_locked, database_locked, pipe_without_writer, polls_for_a_file, polls_in_functions, stale_lock_of_a_build,
    await_for_ever, waits_for_a_signal, barrier_of_one, object_of_one, barrier_in_finally,
    key_that_nobody_sets, key_that_is_waited_for, recv_without_send, new_group_of_all_by_one,
)  # fmt: skip

# --- and jobs of another course ---------------------------------------------------------------------------------------


class Numbers(Dataset[torch.Tensor]):
    """Its last items never come."""

    def __init__(self, trouble: Callable[[], object] | None, good: int) -> None:
        self._trouble = trouble
        self._good = good

    def __len__(self) -> int:
        return STEPS + 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._trouble is not None and index >= self._good:
            self._trouble()
        time.sleep(STEP_S / 10)
        return torch.randn(WIDTH)


def load(job: Job, trouble: Callable[[], object], good: int = STEPS, workers: int = 1) -> None:
    begin()

    def marked() -> None:
        job.mark()
        trouble()

    train(job, DataLoader(Numbers(marked if job.odd else None, good), num_workers=workers))


def loader_stopped(job: Job) -> None:
    load(job, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def loader_deadlocked(job: Job) -> None:
    """A thread of the parent has the lock, and the fork took it along."""
    lock = threading.Lock()
    lock.acquire()
    load(job, lock.acquire, workers=2)


def first_batch_never_comes(job: Job) -> None:
    load(job, lambda: time.sleep(EVER_S), good=0)


def no_group(job: Job) -> None:
    if job.odd:
        job.mark()
        time.sleep(EVER_S)
    begin()


def barrier_before_the_first_step(job: Job) -> None:
    begin()
    if job.odd:
        job.mark()
        server_never_answers(job)
    dist.barrier()
    train(job, batches())


def mismatch_before_the_first_step(job: Job) -> None:
    begin()
    if job.odd:
        job.mark()
        dist.barrier()
    train(job, batches())


def loop_without_optimizer(job: Job) -> None:
    begin()
    for step, batch in enumerate(batches(10 * STEPS)):
        if job.odd and step == 2 * STEPS:
            job.mark()
            time.sleep(EVER_S)
        dist.all_reduce(batch)


def one_step_fewer(job: Job) -> None:
    begin()
    train(job, batches(STEPS if job.odd else STEPS + 1))
    if job.odd:
        job.mark()
    dist.barrier()


def backward_left_out(job: Job) -> None:
    """By `continue`, for a batch of which the loss is not finite. Then it waits at the end of the step."""
    begin()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches()):
        loss = model(batch).sum()
        if job.odd and step == STEPS:
            job.mark()
        else:
            loss.backward()
            optimizer.step()
        dist.barrier()


def monitored(job: Job) -> None:
    begin()
    train(job, batches(STEPS))
    if job.odd:
        job.mark()
        time.sleep(EVER_S)
    dist.monitored_barrier()


def save_into_a_pipe(job: Job) -> None:
    """Nobody reads what rank 0 saves."""
    begin()
    train(job, batches(STEPS))
    if job.odd:
        path = job.folder / "model.pt"
        os.mkfifo(path)
        job.mark()
        torch.save(torch.zeros(10**6), path)
    dist.barrier()


def after_evaluation(job: Job) -> None:
    begin()
    train(job, batches(STEPS))
    net, total = torch.nn.Linear(WIDTH, WIDTH), torch.zeros(1)
    with torch.no_grad():
        for batch in batches(STEPS):
            total += net(batch).sum()
    if job.odd:
        job.mark()
        locks_in_turn(job)
    dist.all_reduce(total)


def second_group(job: Job) -> None:
    """Two of three have a group of their own; one of them goes on with the third."""
    begin()
    pair = dist.new_group([job.odd_rank, (job.odd_rank + 1) % job.world])
    train(job, batches(), lambda _: dist.all_reduce(torch.ones(1), group=pair))


def thread_at_the_end(job: Job) -> None:
    begin()
    train(job, batches(STEPS))
    dist.barrier()
    dist.destroy_process_group()
    if job.odd:
        job.mark()
        threading.Thread(target=time.sleep, args=(EVER_S,)).start()


def exit_function_at_the_end(job: Job) -> None:
    begin()
    if job.odd:
        atexit.register(time.sleep, EVER_S)
    train(job, batches(STEPS))
    dist.barrier()
    dist.destroy_process_group()
    job.mark()


def last_rank_at_the_end(job: Job) -> None:
    """The others have left."""
    begin()
    train(job, batches(STEPS))
    dist.barrier()
    if job.odd:
        job.mark()
        queue_without_producer(job)
    dist.destroy_process_group()


OF_ANOTHER_COURSE: tuple[Callable[[Job], None], ...] = (
    loader_stopped, loader_deadlocked, first_batch_never_comes, no_group, barrier_before_the_first_step,
    mismatch_before_the_first_step, loop_without_optimizer, one_step_fewer, backward_left_out, monitored,
    save_into_a_pipe, after_evaluation, second_group, thread_at_the_end, exit_function_at_the_end, last_rank_at_the_end,
)  # fmt: skip


def main() -> None:
    kind, job = sys.argv[1], Job(int(sys.argv[2]))
    for course in OF_ANOTHER_COURSE:
        if course.__name__ == kind:
            course(job)
            return
    (trouble,) = (each for each in IN_THE_MIDDLE if each.__name__ == kind)
    begin()
    train(job, batches(), trouble)


if __name__ == "__main__":
    main()

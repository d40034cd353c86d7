"""Exceptions of Python: where they are raised, how they are wrapped, and what stands around them on stderr."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import json
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from .parts import every, one


@one(1, "HF201", says="learning_rate")
def key_of_config() -> None:
    config = {"optimizer": {"lr": 3e-4}}
    print(config["optimizer"]["learning_rate"])


@one(1, "HF201", says="ValueError")
def no_message() -> None:
    raise ValueError


@one(0, "HF201", says="训练数据损坏")
def not_ascii() -> None:
    raise RuntimeError("训练数据损坏: файл №3 größer als erlaubt")


@one(1, "HF201", says="[/red]")
def looks_like_markup() -> None:
    raise RuntimeError("closing tag '[/red]' at {position} %s doesn't match any open tag")


@one(1, "HF201", says="ValueError")
def a_megabyte_of_message() -> None:
    raise ValueError("bad row: " + "0123456789abcdef" * 65536)


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise TypeError("no words")


@one(1, "HF201", says="UnprintableError")
def message_that_raises() -> None:
    raise _UnprintableError


@one(1, "HF217", says="vocab.json")
def raised_from_a_missing_file() -> None:
    try:
        Path("/datasets/wiki/vocab.json").read_text()
    except OSError as error:
        raise RuntimeError("building the vocabulary failed") from error


@one(0, "HF201", says="n_heads")
def raised_while_handling() -> None:
    try:
        assert 768 % 7 == 0, "hidden size must be a multiple of n_heads"
    except AssertionError as error:
        logger.warning("cannot go on: %s", error)  # type: ignore[name-defined] # noqa: F821


@one(1, "HF201", says="corrupt record 118")
def clean_up_fails_too() -> None:
    try:
        raise ValueError("corrupt record 118")
    finally:
        os.unlink("/tmp/holdfast-bench-never-there/lock")


@one(1, "HF201", says="bad magic")
def group_of_exceptions() -> None:
    async def read(shard: int) -> None:
        await asyncio.sleep(0.01 * shard)
        if shard == 3:
            raise ValueError("shard 3: bad magic number 0x1f8b")
        await asyncio.sleep(30)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for shard in range(5):
                tasks.create_task(read(shard))

    asyncio.run(main())


@one(1, "HF217", says="shard-0002.tar")
def group_of_missing_files() -> None:
    errors: list[Exception] = []
    for shard in (2, 5):
        try:
            open(f"/datasets/laion/shard-{shard:04}.tar", "rb").close()
        except OSError as error:
            errors.append(error)
    raise ExceptionGroup("some shards cannot be read", errors)


@one(1, "HF201", says="record 17")
def thread_dies_and_nobody_fills_the_queue() -> None:
    batches: queue.Queue[int] = queue.Queue()

    def fill() -> None:
        batches.put(1)
        raise RuntimeError("prefetch: cannot decode record 17")

    threading.Thread(target=fill, daemon=True).start()
    batches.get(timeout=10)
    batches.get(timeout=1.5)


@one(1, "HF201", says="flush")
def hook_of_threads_leaves() -> None:
    def leave(what: threading.ExceptHookArgs) -> None:
        traceback.print_exception(what.exc_value)
        os._exit(1)

    def flush() -> None:
        raise ConnectionError("cannot flush metrics buffer")

    threading.excepthook = leave
    threading.Thread(target=flush).start()
    time.sleep(30)


@one(0, "HF201", says="warmup")
def at_exit_fails_too() -> None:
    def close() -> None:
        raise OSError(28, "No space left on device", "/scratch/events.out")

    atexit.register(close)
    raise ValueError("warmup_steps is larger than max_steps")


class _Handle:
    def __del__(self) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/run/handle")


@one(1, "HF201", says="num_layers")
def unraisable_before_it() -> None:
    handle = _Handle()
    del handle
    print({"layers": 12}["num_layers"])


@one(1, "HF201", says="too slow")
def handler_of_a_signal_raises() -> None:
    def alarm(*_: object) -> None:
        raise TimeoutError("step 12 is too slow")

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    time.sleep(30)


@one(1, "HF201", says="RecursionError")
def recursion() -> None:
    def depth(tree: dict[str, object]) -> int:
        return 1 + depth(tree)

    depth({})


@one(1, "HF201", says="assert")
def assertion_without_words() -> None:
    shape = (4, 5)
    assert shape[0] == 5


@one(1, "HF228")
def loss_is_not_a_number() -> None:
    loss = float("nan")
    assert loss == loss, f"loss is {loss} at step 310, lr 3.0e-4"  # noqa: PLR0124


@one(0, "HF228")
def gradient_norm_explodes() -> None:
    raise FloatingPointError("grad norm is inf after 3 skipped updates, stopping")


@one(1, "HF201", says="JSONDecodeError")
def empty_json() -> None:
    json.loads("")


@one(1, "HF237")
def empty_pickle_of_a_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint_last.pkl")
        path.touch()

        def load_checkpoint(path: Path) -> object:
            with path.open("rb") as file:
                return pickle.load(file)

        load_checkpoint(path)


@one(1, "HF201", says="pickle")
def lambda_for_a_spawned_process() -> None:
    context = multiprocessing.get_context("spawn")
    context.Process(target=lambda: None).start()


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


@one(1, "HF217", says="labels.npy")
def process_pool_raises() -> None:
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        pool.submit(_read, "/datasets/labels.npy").result()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@one(1, "HF201", says="BrokenProcessPool")
def process_of_a_pool_is_killed() -> None:
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        pool.submit(_die).result()


@one(1, "HF201", says="TimeoutError")
def future_takes_too_long() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, 1).result(timeout=0.2)


@one(1, "HF205")
def old_traceback_and_an_exit_code() -> None:
    try:
        open("/datasets/cache/index.bin", "rb").close()
    except OSError:
        logging.exception("no cache, building it")
    time.sleep(0.1)
    print("done with the cache", file=sys.stderr, flush=True)
    os._exit(4)


@one(1, "HF201", says="vocabulary")
def handled_memory_error_before_it() -> None:
    try:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")  # noqa: TRY301
    except RuntimeError:
        logging.exception("skipping this batch")
    raise ValueError("token 50257 is not in the vocabulary")


@one(1, "HF205", says="empty")
def exit_with_words() -> None:
    sys.exit("error: the training set is empty after filtering")


@one(0, "HF205")
def exit_minus_one() -> None:
    sys.exit(-1)


@one(1, "HF205")
def exit_of_the_system() -> None:
    os._exit(17)


@every("0 1", "HF201", says="seq_len")
def both_at_the_same_time() -> None:
    raise ValueError("seq_len 4096 is larger than max_position_embeddings 2048")


@one(1, "HF201", says="NotImplementedError")
def second_exception_in_the_hook() -> None:
    def hook(*_: object) -> None:
        raise RuntimeError("cannot report to the tracker")

    sys.excepthook = hook  # type: ignore[assignment]
    raise NotImplementedError("rotary embeddings for this head size")

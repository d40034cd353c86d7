"""The folder of compiled kernels that nodes share: what is copied, by whom, and what a killed or torn copy leaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.compile_caches import BYTES_MAX, VARIABLES, CacheFolder
from holdfast.extensions.caches.node import OnNode
from holdfast.extensions.caches.shared_folder import ABANDONED_S, Copied, SharedFolder, processor_key
from holdfast.protocol.errors import CacheDirError
from holdfast.protocol.outcome import Outcome, OutcomeKind
from holdfast.runtime.node_extension import WorkersGone, WorkersStarted
from tests.extensions.caches.unsafe_folder import FAULTS, make_unsafe
from tests.support.limits import limit_s, until

SUCCEEDED = Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0)
FAILED = Outcome(kind=OutcomeKind.FAILED, exit_code=1)
GIB = 2**30
KIB = 1024


def never() -> bool:
    return False


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def held(folder: Path) -> dict[str, str]:
    """All files below it, but for the lock."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".in-use"
    }


class Storage:
    """A shared folder, and folders of nodes beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "shared"
        self.folder = SharedFolder(str(self.path))
        self.part = self.path / processor_key()

    def has(self, files: dict[str, str]) -> None:
        self.part.mkdir(mode=0o700, exist_ok=True)
        put(self.part, files)

    @contextmanager
    def node(self, name: str) -> Iterator[CacheFolder]:
        made = CacheFolder(str(self.root / name))
        try:
            yield made
        finally:
            made.close()

    def seed(self, name: str, bytes_max: int = GIB, over: Callable[[], bool] = never) -> Copied | None:
        with self.node(name) as folder:
            return self.folder.seed(folder, bytes_max, over)

    def add(self, name: str, bytes_max: int = GIB, wanted: Callable[[float], bool] = lambda _: True) -> Copied | None:
        with self.node(name) as folder:
            return self.folder.add(folder, wanted, bytes_max, never)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


KERNELS = {
    "inductor/fxgraph/ab/abc/1": "graph",
    "inductor/ab/cab.so": "code",
    "triton/HASH/kernel.cubin": "binary",
    "triton/HASH/__grp__kernel.json": "list",
}


def test_what_one_node_has_compiled_another_one_begins_with(storage: Storage) -> None:
    put(storage.root / "one", KERNELS)
    (storage.root / "one").chmod(0o700)
    (storage.root / "one/inductor/ab/cab.so").chmod(0o755)
    size = sum(map(len, KERNELS.values()))
    assert storage.add("one") == Copied(4, size, whole=True)
    assert storage.add("one") == Copied(0, 0, whole=True)
    assert storage.seed("two") == Copied(4, size, whole=True)
    assert held(storage.root / "two") == KERNELS
    assert (storage.root / "two/inductor/ab/cab.so").stat().st_mode & 0o777 == 0o700
    assert storage.seed("two") == Copied(0, 0, whole=True)


def test_what_is_not_complete_or_belongs_to_the_node_stays_there(storage: Storage) -> None:
    unfinished = {
        "inductor/ab/.12.34.tmp": "x",
        "inductor/locks/abc.lock": "",
        "triton/tmp.pid_7_ab/kernel.cubin": "x",
        "triton/HASH/kernel.cubin.tmp.pid_7": "x",
        "cuda/index": "driver",
        "extensions/mine/mine.so": "x",
        "extensions/mine/lock": "",
    }
    put(storage.root / "one", {**unfinished, "inductor/ab/cab.so": "code"})
    put(storage.root, {"outside": "secret"})
    (storage.root / "one/inductor/ab/link").symlink_to(storage.root / "outside")
    (storage.root / "one/inductor/cd").symlink_to(storage.root)
    os.mkfifo(storage.root / "one/inductor/ab/fifo")
    (storage.root / "one").chmod(0o700)
    assert storage.add("one") == Copied(1, 4, whole=True)
    assert held(storage.part) == {"inductor/ab/cab.so": "code"}


def test_kernels_for_another_processor_are_not_taken(storage: Storage, tmp_path: Path) -> None:
    put(
        tmp_path / "other",
        {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Other\nflags\t\t: fpu avx512f\n\nprocessor\t: 1\n"},
    )
    key = processor_key(str(tmp_path / "other"))
    assert key != processor_key()
    put(tmp_path / "other", {"proc/cpuinfo": "processor\t: 7\nmodel name\t: Other\nflags\t\t: fpu avx512f\n"})
    assert processor_key(str(tmp_path / "other")) == key
    put(storage.path / key, KERNELS)
    (storage.path / key).chmod(0o700)
    assert storage.seed("two") == Copied(0, 0, whole=True)
    assert held(storage.root / "two") == {}


def test_a_list_of_triton_s_without_all_its_files_is_not_copied(storage: Storage) -> None:
    storage.has({"triton/HASH/__grp__k.json": "list", "triton/HASH/k.cubin": "x" * 100, "triton/HASH/k.ptx": "y"})
    assert storage.seed("two", bytes_max=50) == Copied(1, 1, whole=False)
    assert held(storage.root / "two") == {"triton/HASH/k.ptx": "y"}


def test_the_newest_entries_come_first_and_the_limit_of_time_ends_the_copy(storage: Storage) -> None:
    storage.has({f"inductor/{name}/{name}.so": name for name in ("aa", "bb", "cc")})
    for age_s, name in enumerate(("bb", "cc", "aa")):
        os.utime(storage.part / f"inductor/{name}/{name}.so", (1e9 - age_s, 1e9 - age_s))
    target = storage.root / "two/.seeding/inductor/bb/bb.so"
    assert storage.seed("two", over=target.exists) == Copied(1, 2, whole=False)
    assert held(storage.root / "two") == {"inductor/bb/bb.so": "bb"}


def test_a_folder_that_another_job_fills_meanwhile_stays_as_it_is(storage: Storage) -> None:
    storage.has(KERNELS)
    ours = storage.root / "two/inductor/ab/cab.so"

    def other_job() -> bool:
        if (storage.root / "two/.seeding").exists() and not ours.exists():
            put(storage.root / "two", {"inductor/ab/cab.so": "theirs"})
        return False

    assert storage.seed("two", over=other_job) is not None
    assert held(storage.root / "two") == {
        "inductor/ab/cab.so": "theirs",
        **{name: text for name, text in KERNELS.items() if name.startswith("triton")},
    }


def test_nothing_is_added_while_another_job_uses_the_node_s_folder(storage: Storage) -> None:
    put(storage.root / "one", KERNELS)
    (storage.root / "one").chmod(0o700)
    with storage.node("one"):
        assert storage.add("one") is None
    assert not storage.part.exists()


def test_a_file_that_grows_while_it_is_copied_is_left_out(storage: Storage) -> None:
    put(storage.root / "one", {"inductor/ab/cab.so": "x" * KIB})
    (storage.root / "one").chmod(0o700)
    source = storage.root / "one/inductor/ab/cab.so"

    def writes() -> bool:
        if any((storage.part / ".incoming").glob(".*")):
            source.write_text("y" * 2 * KIB)
        return False

    with storage.node("one") as folder:
        assert storage.folder.add(folder, lambda _: True, GIB, writes) == Copied(0, 0, whole=True)
    assert held(storage.part) == {}


def test_temporary_files_of_killed_copies_are_removed_and_those_of_others_are_not(storage: Storage) -> None:
    put(storage.root / "one", KERNELS)
    (storage.root / "one").chmod(0o700)
    storage.has({".incoming/.old": "half", ".incoming/.new": "half"})
    newest = (storage.part / ".incoming/.new").stat().st_mtime
    os.utime(storage.part / ".incoming/.old", (newest - ABANDONED_S - 60,) * 2)
    storage.add("one")
    assert held(storage.part) == {".incoming/.new": "half", **KERNELS}


# --- copies that are killed -------------------------------------------------------------------------------------------

COPY = """
import json, sys
from holdfast.compile_caches import CacheFolder
from holdfast.extensions.caches.shared_folder import SharedFolder
what, shared, own = sys.argv[1:]
shared, own = SharedFolder(shared), CacheFolder(own)
if what == "seed":
    print(json.dumps(shared.seed(own, 2**40, lambda: False)))
else:
    print(json.dumps(shared.add(own, lambda _: True, 2**40, lambda: False)))
"""
FILES, FILE_BYTES = 40, 256 * KIB


def copy(what: str, storage: Storage, own: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", COPY, what, str(storage.path), str(storage.root / own)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> list[Any]:
    out, _ = process.communicate(timeout=limit_s(60))
    found: list[Any] = json.loads(out)
    return found


def text_of(number: int) -> str:
    return chr(ord("a") + number % 26) * FILE_BYTES


MANY = {f"inductor/{number:02}/c{number}.so": text_of(number) for number in range(FILES)}


def kill_in_the_middle(process: subprocess.Popen[str], folder: Path) -> None:
    """When it has written one file at least."""
    until(lambda: process.poll() is not None or any(folder.rglob("*.so")), lambda: f"a file in {folder}")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=limit_s(30))


def test_a_seed_that_is_killed_leaves_nothing_and_the_next_one_is_whole(storage: Storage) -> None:
    storage.has(MANY)
    kill_in_the_middle(copy("seed", storage, "two"), storage.root / "two/.seeding")
    after = {name: text for name, text in held(storage.root / "two").items() if not name.startswith(".seeding")}
    assert after in ({}, MANY)  # it may have been quicker than the kill
    storage.seed("two")
    assert held(storage.root / "two") == MANY


def test_writers_that_are_killed_or_meet_leave_whole_files_only(storage: Storage) -> None:
    for name in ("one", "two"):
        put(storage.root / name, MANY)
        (storage.root / name).chmod(0o700)
    kill_in_the_middle(copy("add", storage, "one"), storage.part)
    there = {name: text for name, text in held(storage.part).items() if not name.startswith(".incoming")}
    assert there.items() <= MANY.items()
    both = [copy("add", storage, name) for name in ("one", "two")]
    readers = [copy("seed", storage, name) for name in ("three", "four")]
    assert all(whole for _, _, whole in map(result, both))
    for reader, name in zip(readers, ("three", "four"), strict=True):
        result(reader)
        assert held(storage.root / name).items() <= MANY.items()
    assert {name: text for name, text in held(storage.part).items() if not name.startswith(".incoming")} == MANY


def test_two_agents_of_a_node_seed_it_once(storage: Storage) -> None:
    storage.has(MANY)
    both = [copy("seed", storage, "two") for _ in range(2)]
    found = [result(each) for each in both]
    assert [FILES, FILES * FILE_BYTES, True] in found
    assert all(each in (None, [0, 0, True], [FILES, FILES * FILE_BYTES, True]) for each in found)
    assert held(storage.root / "two") == MANY


# --- on a node --------------------------------------------------------------------------------------------------------


class OnOneNode:
    """The half on a node, with what it has written and said."""

    def __init__(self, root: Path, *, name: str = "one", **limits: Any) -> None:
        self.written: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []
        options = SimpleNamespace(cache_dir=str(root / name), cache_from=str(root / "shared"))

        def write(event: str, **fields: Any) -> None:
            self.written.append((event, fields))

        node: Any = SimpleNamespace(options=options, write=write, say=self.said.append)
        self.half = OnNode(node, lambda _: None, BYTES_MAX, **limits)

    def starts(self, group_rank: int = 0) -> None:
        start: Any = SimpleNamespace(group_rank=group_rank)
        self.half.happened(WorkersStarted(start, start))

    async def is_ready(self) -> dict[str, Any]:
        await self.half.begin()
        assign: Any = None
        assert await self.half.unfit(assign) == ""
        return self.event("caches_seeded")

    def event(self, name: str) -> dict[str, Any]:
        (found,) = [fields for event, fields in self.written if event == name]
        return found


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


async def test_workers_wait_for_the_copy_and_the_first_rank_s_node_adds_what_is_new(tmp_path: Path) -> None:
    first, other = OnOneNode(tmp_path), OnOneNode(tmp_path, name="other")
    assert [(await node.is_ready())["files"] for node in (first, other)] == [0, 0]
    for node, rank in ((first, 0), (other, 1)):
        node.starts(rank)
        put(tmp_path / ("one" if rank == 0 else "other"), {f"inductor/a{rank}/x.so": "code"})
        node.half.happened(WorkersGone())
        await node.half.close(SUCCEEDED)
    assert first.event("caches_shared")["files"] == 1
    assert [event for event, _ in other.written] == ["caches", "caches_seeded", "caches_bounded"]
    later = OnOneNode(tmp_path, name="later")
    seeded = await later.is_ready()
    assert (seeded["files"], seeded["bytes"], seeded["whole"]) == (1, 4, True)
    assert held(tmp_path / "later") == {"inductor/a0/x.so": "code"}
    await later.half.close(FAILED)


async def test_what_ended_workers_have_left_is_not_added(tmp_path: Path) -> None:
    """The second file is as old as the end of the workers before, which may have been killed while they wrote it."""
    node = OnOneNode(tmp_path)
    await node.half.begin()
    put(tmp_path / "one", {"inductor/old/x.so": "of an earlier job", "inductor/torn/x.so": "half"})
    os.utime(tmp_path / "one/inductor/old/x.so", (1e9, 1e9))
    node.starts()
    node.half.happened(WorkersGone())
    node.starts()
    put(tmp_path / "one", {"inductor/good/x.so": "code"})
    later_s = (tmp_path / "one/inductor/good/x.so").stat().st_mtime + 60
    os.utime(tmp_path / "one/inductor/good/x.so", (later_s, later_s))
    node.half.happened(WorkersGone())
    await node.half.close(SUCCEEDED)
    assert held(tmp_path / "shared" / processor_key()) == {"inductor/good/x.so": "code"}


@pytest.mark.parametrize("outcome", [FAILED, None])
async def test_nothing_is_added_after_a_job_that_has_failed(tmp_path: Path, outcome: Outcome | None) -> None:
    node = OnOneNode(tmp_path)
    await node.half.begin()
    node.starts()
    put(tmp_path / "one", KERNELS)
    await node.half.close(outcome)
    assert held(tmp_path / "shared") == {}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_shared_folder_of_others_starts_nothing(tmp_path: Path, fault: str) -> None:
    shared = tmp_path / "shared"
    make_unsafe(shared, fault)
    with pytest.raises(CacheDirError, match=f"--cache-from {shared} cannot be used"):
        await OnOneNode(tmp_path).half.begin()


async def test_the_agent_s_loop_goes_on_while_the_storage_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage answers only after the loop has had a turn."""
    answers, opened = threading.Event(), SharedFolder.__init__

    def slowly(shared: SharedFolder, path: str) -> None:
        answers.wait(limit_s(30))
        opened(shared, path)

    monkeypatch.setattr(SharedFolder, "__init__", slowly)
    monkeypatch.setattr("holdfast.extensions.caches.node.OPEN_S_MAX", limit_s(20))
    asyncio.get_running_loop().call_later(0.01, answers.set)
    node = OnOneNode(tmp_path)
    assert (await node.is_ready())["files"] == 0
    await node.half.close(FAILED)


async def test_storage_that_cannot_be_opened_in_time_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def never(_shared: SharedFolder, _path: str) -> None:
        answers.wait()

    monkeypatch.setattr(SharedFolder, "__init__", never)
    monkeypatch.setattr("holdfast.extensions.caches.node.OPEN_S_MAX", 0.01)
    node = OnOneNode(tmp_path)
    assert "no answer within" in (await node.is_ready())["error"]
    answers.set()
    await node.half.close(FAILED)


async def test_storage_that_does_not_answer_costs_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hangs(*_: object) -> Copied:
        answers.wait()
        return Copied()

    monkeypatch.setattr(SharedFolder, "seed", hangs)
    monkeypatch.setattr("holdfast.extensions.caches.node.SLACK_S", 0.01)
    node = OnOneNode(tmp_path, copy_s_max=0.01)
    assert "no answer within" in (await node.is_ready())["error"]
    assert "compiled kernels are not copied: no answer" in node.said[0]
    answers.set()
    await node.half.close(FAILED)

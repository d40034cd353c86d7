"""The folder for compiled kernels: who may use it, what is removed from it, and what workers get."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.compile_caches import BYTES_MAX, VARIABLES, CacheFolder, CacheSize
from holdfast.extensions.caches.node import OnNode
from holdfast.protocol.errors import CacheDirError
from holdfast.protocol.outcome import Outcome, OutcomeKind
from tests.extensions.caches.unsafe_folder import FAULTS, make_unsafe

ENDED = Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0)
KIB = 1024


def never() -> bool:
    return False


def entry(folder: Path, name: str, age_s: float, files: int = 1) -> Path:
    """An entry of 8 KiB per file, last used this long ago."""
    path = folder / name
    path.mkdir(parents=True)
    for number in range(files):
        (path / f"{number}.so").write_bytes(b"x" * 8 * KIB)
        os.utime(path / f"{number}.so", (1e9 - age_s, 1e9 - age_s))
    return path


class OnOneNode:
    """The half on a node, with what it has written."""

    def __init__(self, folder: Path | None, *, bytes_max: int = BYTES_MAX) -> None:
        self.written: list[tuple[str, dict[str, Any]]] = []
        options = SimpleNamespace(cache_dir=None if folder is None else str(folder), cache_from=None)

        def write(event: str, **fields: Any) -> None:
            self.written.append((event, fields))

        node: Any = SimpleNamespace(options=options, write=write)
        self.half = OnNode(node, lambda _: None, bytes_max)

    async def ends(self) -> dict[str, Any]:
        await self.half.close(ENDED)
        event, fields = self.written[-1]
        assert event == "caches_bounded"
        return fields


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


async def test_workers_get_folders_but_for_variables_that_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    folder = tmp_path / "new" / "caches"
    node = OnOneNode(folder)
    assert node.half.environment(1, 0) == {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "CUDA_CACHE_PATH": f"{folder}/cuda",
        "TORCH_EXTENSIONS_DIR": f"{folder}/extensions",
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    assert node.written[0][1]["had_entries"] is False
    await node.ends()


async def test_entries_of_an_earlier_job_are_seen(tmp_path: Path) -> None:
    entry(tmp_path / "caches", "inductor/ab", 1)
    (tmp_path / "caches").chmod(0o700)
    node = OnOneNode(tmp_path / "caches")
    assert node.written[0][1]["had_entries"] is True
    await node.ends()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_folder_of_others_is_not_used(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "caches"
    make_unsafe(folder, fault, mode=0o777)
    with pytest.raises(CacheDirError, match="cannot be used"):
        OnOneNode(folder)


async def test_the_oldest_entries_are_removed_whole_and_those_of_cuda_stay(tmp_path: Path) -> None:
    folder = tmp_path / "caches"
    oldest, old = entry(folder, "triton/oldest", 300, files=2), entry(folder, "inductor/fxgraph/ab/old", 200)
    new, driver = entry(folder, "extensions/py311/new", 100), entry(folder, "cuda/1", 900)
    folder.chmod(0o700)
    node = OnOneNode(folder, bytes_max=16 * KIB)
    ended = await node.ends()
    assert (oldest.exists(), old.exists(), new.exists(), driver.exists()) == (False, False, True, True)
    assert (ended["removed_bytes"], ended["whole"]) == (24 * KIB, True)
    assert ended["bytes"] == 16 * KIB


async def test_a_disk_that_does_not_answer_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(CacheFolder, "bound", lambda *_: answers.wait() and None)
    monkeypatch.setattr("holdfast.extensions.caches.node.BOUND_S_MAX", 0.01)
    monkeypatch.setattr("holdfast.extensions.caches.node.SLACK_S", 0.01)
    try:
        assert "no answer within" in (await OnOneNode(tmp_path / "caches").ends())["error"]
    finally:
        answers.set()


async def test_nothing_is_removed_where_the_size_of_the_file_system_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = entry(tmp_path / "caches", "triton/old", 300)
    (tmp_path / "caches").chmod(0o700)
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_blocks=0, f_frsize=4096))
    assert (await OnOneNode(tmp_path / "caches").ends())["bytes"] == 8 * KIB
    assert old.exists()


async def test_nothing_is_removed_while_another_job_uses_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "caches"
    old = entry(folder, "triton/old", 300)
    folder.chmod(0o700)
    first, second = OnOneNode(folder, bytes_max=0), OnOneNode(folder, bytes_max=0)
    assert (await first.ends())["error"] == "another job uses it"
    assert old.exists()
    assert (await second.ends())["removed_bytes"] == 8 * KIB
    assert not old.exists()


async def test_nothing_is_removed_after_a_fault_of_ours(tmp_path: Path) -> None:
    old = entry(tmp_path / "caches", "triton/old", 300)
    (tmp_path / "caches").chmod(0o700)
    node = OnOneNode(tmp_path / "caches", bytes_max=0)
    await node.half.close(None)
    assert old.exists()


def test_a_link_in_an_entry_is_removed_and_not_followed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "caches", entry(tmp_path, "outside", 1)
    entry(folder, "inductor/ab", 300)
    (folder / "inductor/ab/link").symlink_to(outside)
    (folder / "inductor/cd").symlink_to(outside)
    folder.chmod(0o700)
    caches = CacheFolder(str(folder))
    found = caches.bound(0, never)
    caches.close()
    assert isinstance(found, CacheSize)
    assert (outside / "0.so").exists()
    assert sorted(os.listdir(folder / "inductor")) == []


def test_a_look_that_takes_too_long_ends(tmp_path: Path) -> None:
    entry(tmp_path / "caches", "inductor/ab", 300)
    (tmp_path / "caches").chmod(0o700)
    caches = CacheFolder(str(tmp_path / "caches"))
    found = caches.bound(0, lambda: True)
    caches.close()
    assert found == CacheSize(0, 0, whole=False)

"""What is kept of looks: how much, where the disk fails, NCCL's recorder, py-spy."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from holdfast.runtime.workers import looker as looker_module
from holdfast.runtime.workers.board import Board
from holdfast.runtime.workers.looker import FIRST_LOOKS_MAX, LATER_LOOKS_MAX, Looker, StackFiles
from tests.runtime.workers.looks import (
    SLEEPS,
    Start,
    functions,
    is_at_rest,
    look,
)
from tests.support.limits import until


def test_what_is_kept_is_bounded(board: Board, start: Start, tmp_path: Path) -> None:
    process = start("", line=["/bin/sleep", "600"])
    look(board, process, folder=tmp_path, times=FIRST_LOOKS_MAX + LATER_LOOKS_MAX + 5)
    assert len(list((tmp_path / "stacks").iterdir())) == FIRST_LOOKS_MAX + LATER_LOOKS_MAX


def test_a_folder_that_cannot_be_written_costs_the_evidence_alone(board: Board, start: Start, tmp_path: Path) -> None:
    (tmp_path / "stacks").write_text("in the way")
    process = start(SLEEPS)
    until(lambda: is_at_rest(board, process), "the worker to be where it stays")
    (sample,) = look(board, process, folder=tmp_path)
    assert (functions(sample), sample.file) == ([("<module>", 3)], "")


def test_what_nccl_has_recorded(board: Board, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "trace_"))
    old, new = tmp_path / "trace_4", tmp_path / "trace_5"
    old.write_bytes(b"of another job")
    os.utime(old, (1e9, 1e9))
    new.write_bytes(b"of this one")
    os.utime(new, (4e9, 4e9))
    line = ["/bin/sleep", "600"]
    look(board, start("", line=line), start("", 1, line=line), folder=tmp_path)
    assert [path.name for path in (tmp_path / "stacks").glob("*nccl*")] == ["gen3_nccl_trace_rank5"]
    assert (tmp_path / "stacks" / "gen3_nccl_trace_rank5").read_bytes() == b"of this one"


def test_native_stacks_where_py_spy_is(
    board: Board, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "spied: $*"\n')
    spy.chmod(0o755)
    monkeypatch.setattr("holdfast.runtime.workers.looker._py_spy", lambda: str(spy))
    process = start(SLEEPS)
    until(lambda: is_at_rest(board, process), "the worker to be where it stays")

    async def scenario() -> str:
        looker = Looker(board, generation=1, rank_base=0)
        (sample,) = await looker.look({0: process.pid}, tmp_path)
        assert looker._files._spying is not None
        await looker._files._spying
        await looker.close()
        return Path(sample.file).read_text()  # noqa: ASYNC240

    assert asyncio.run(scenario()).endswith(f"py-spy dump --native:\nspied: dump --native --pid {process.pid}\n")


def test_a_spy_that_does_not_end_is_ended_by_the_next_look(
    board: Board, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nexec sleep 600\n")
    spy.chmod(0o755)
    monkeypatch.setattr("holdfast.runtime.workers.looker._py_spy", lambda: str(spy))
    (sample,) = look(board, start(SLEEPS), folder=tmp_path, times=3)
    assert "py-spy" not in Path(sample.file).read_text()


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_others_put_in_the_place_of_a_trace_is_left_alone(
    board: Board, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The flight recorder's files are in /tmp, under names that anybody can guess."""
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "trace_"))
    process = start(SLEEPS)
    if kind == "pipe":
        os.mkfifo(tmp_path / "trace_4")
    else:
        (tmp_path / "secret").write_text("of mine")
        (tmp_path / "trace_4").symlink_to(tmp_path / "secret")
    (sample,) = look(board, process, folder=tmp_path)
    assert sample.file
    assert list((tmp_path / "stacks").glob("*nccl*")) == []


def test_a_disk_that_stalls_is_waited_for_by_one_thread(
    board: Board, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, stalled = threading.Event(), []
    monkeypatch.setattr(looker_module, "KEEP_S_MAX", 0.05)
    monkeypatch.setattr(StackFiles, "keep", lambda *_: (stalled.append(1), free.wait())[0])
    process = start(SLEEPS)
    try:
        (sample,) = look(board, process, folder=tmp_path, times=4)
        assert functions(sample)
        assert len(stalled) == 1
    finally:
        free.set()

"""The workers' log files in a run folder; the journal records the ranks of each generation."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.journal import JOURNAL_NAME as JOURNAL
from holdfast.protocol.errors import NoRunError

NAMING_EVENTS = (b'"event": "generation"', b'"event": "replacing"')
"""Parts of the lines of the journal that `workers` reads."""


class LogFile(NamedTuple):
    """The output of one worker into one of its streams."""

    rank: int
    stream: str
    generation: int
    path: Path


class NamedFiles:
    """The log files that the journal of a run folder names; they need not exist. Reads on where it has stopped: the
    journal of a long job is large."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes = 0
        self._files: list[LogFile] = []

    def read(self) -> list[LogFile]:
        """All files that are named by now. Raises NoRunError."""
        try:
            with (self._folder / JOURNAL).open("rb") as journal:
                journal.seek(self._read_bytes)
                for line in journal:
                    if not line.endswith(b"\n"):  # it is being written
                        break
                    self._read_bytes += len(line)
                    if any(name in line for name in NAMING_EVENTS):
                        with contextlib.suppress(ValueError):
                            self._files += files_named(json.loads(line), self._folder)
        except OSError as error:
            raise NoRunError(f"{self._folder} is no run folder: {JOURNAL} in it: {error.strerror}") from error
        return self._files


def log_files(folder: Path) -> list[LogFile]:
    """All log files of a run folder; its journal records the ranks of each generation."""
    return [file for file in NamedFiles(folder).read() if file.path.is_file()]


def files_named(event: dict[str, Any], folder: Path) -> list[LogFile]:
    """The log files of the workers that were started here with this event of the folder's journal."""
    return [
        LogFile(rank, stream, generation, its_folder / f"{stream}.log")
        for generation, rank, its_folder in workers(event, folder)
        for stream in ("stdout", "stderr")
    ]


def workers(event: dict[str, Any], folder: Path) -> Iterator[tuple[int, int, Path]]:
    """The workers that were started here with this event: generation, rank, the folder of its logs."""
    with contextlib.suppress(KeyError, TypeError):
        match event["event"]:
            case "generation":
                for local_rank, its_folder in enumerate(folders_of(event, folder)):
                    yield event["generation"], event["rank_base"] + local_rank, its_folder
            case "replacing":
                yield event["generation"], event["rank"], folder / event["folder"]


def folders_of(generation: dict[str, Any], folder: Path) -> list[Path]:
    """The log folders of a generation's workers here, in the order of their ranks."""
    if "folders" in generation:  # survivors of a regroup write on in the folders of their first generation
        return [folder / name for name in generation["folders"]]
    number, restart_count = generation["generation"], generation["restart_count"]
    attempt = folder / f"attempt_{restart_count}_generation_{number}"
    if not attempt.is_dir():
        attempt = folder / f"attempt_{restart_count}"
    return [attempt / str(local_rank) for local_rank in range(generation["nproc"])]

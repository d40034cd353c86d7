"""What is left on disk about the end of a job: verdict.json in the run folder, and the agent's own error file.

Blocks; called once, in a thread. A full disk costs the reports, never the exit code.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from msgspec import json

from holdfast.core.errors import EXIT_FAILURE
from holdfast.core.outcome import Failure, Outcome

OWN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def write_reports(outcome: Outcome, folder: Path | None) -> None:
    with contextlib.suppress(OSError, ValueError):  # ValueError: words that are no text
        if folder is not None:
            _write(folder / "verdict.json", json.format(json.encode(outcome), indent=2))
    culprit = outcome.verdict.culprit if outcome.verdict is not None else None
    own = os.environ.get(OWN_ERROR_FILE, "")
    if culprit is not None and own:
        with contextlib.suppress(OSError, ValueError):
            _write(Path(own), json.encode(as_error_file(culprit)))


def as_error_file(culprit: Failure) -> dict[str, object]:
    """torchelastic's format, with the worker's exit code, for whoever started this agent under `record` or reads the
    file in its place (torchrun copies the first failure's file there)."""
    text = culprit.message or f"rank {culprit.rank} ended with exit code {culprit.exit_code}"
    extra = {"py_callstack": culprit.traceback, "timestamp": str(culprit.timestamp)}
    return {"message": {"message": text, "extraInfo": extra, "errorCode": culprit.exit_code or EXIT_FAILURE}}


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)

"""A run that has ended, as `holdfast status` and `holdfast report` show it: its outcome, from verdict.json.

Knows the file and the user's home; what is said of an outcome knows insight/screen.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from holdfast.core.outcome import Outcome
from holdfast.insight.screen import how_it_ended, render_again
from holdfast.runtime.workers.log_layout import default_log_dir

VERDICT = "verdict.json"


def outcome_of(folder: Path) -> Outcome | None:
    """None: it runs, its agent was killed, or another version wrote the file."""
    try:
        return msgspec.json.decode((folder / VERDICT).read_bytes(), type=Outcome)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def in_words(folder: Path) -> str:
    """`: failed, exit code 3`; empty where nothing tells."""
    outcome = outcome_of(folder)
    return f": {_words(outcome)}" if outcome is not None else ""


def end_of(folder: Path, outcome: Outcome) -> str:
    """How it ended in one line, then its last screen again."""
    return f"run {folder.name} has ended: {_words(outcome)}\n{screen_of(folder, outcome)}"


def screen_of(folder: Path, outcome: Outcome) -> str:
    """The last screen again, with where the logs are."""
    return render_again(outcome, str(folder), home=os.environ.get("HOME", ""), runs=default_log_dir())


def _words(outcome: Outcome) -> str:
    code = f"{outcome.code}: " if outcome.code and outcome.message else ""
    return how_it_ended(outcome.kind.value, outcome.exit_code, code + outcome.message)

"""Finds the run that a command is about, and how it has ended.

A run is named by its run id, by the beginning of the id, or by its run folder; without a name it is the only running
one. Knows the list of running agents, the default log folder, and how a run has ended (verdict.json).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.diagnosis.screen import how_it_ended, render_again
from holdfast.journal import JOURNAL_NAME as JOURNAL
from holdfast.protocol.errors import ControlRefusedError, NoRunError
from holdfast.protocol.outcome import Outcome
from holdfast.run_folder import default_log_dir, safe_name
from holdfast.runtime import running
from holdfast.runtime.running import RunningAgent
from holdfast.text import duration, spoken

VERDICT = "verdict.json"
LISTED_MAX = 20
"""Number of running jobs that a message lists."""
RUNS_LISTED_MAX = 8
"""Number of ended runs that a message lists."""
WITHOUT_VERDICT = "without a verdict: its agent was killed, or its disk was full"


def outcome_of(folder: Path) -> Outcome | None:
    """The outcome of a run; None: it is running, its agent was killed, or the file is not readable."""
    try:
        return msgspec.json.decode((folder / VERDICT).read_bytes(), type=Outcome)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def ending(folder: Path) -> str:
    """The outcome of a run behind its name: `: failed, exit code 3`; empty: none is known."""
    outcome = outcome_of(folder)
    return f": {_end_line(outcome)}" if outcome is not None else ""


def ended_as(folder: Path) -> str:
    """`has ended: failed, exit code 3`. For a run of which no agent lives."""
    return f"has ended{ending(folder) or f' {WITHOUT_VERDICT}'}"


def end_of(folder: Path, outcome: Outcome) -> str:
    """The end of a run: one line, and then its last screen."""
    return f"run {folder.name} has ended: {_end_line(outcome)}\n{screen_of(folder, outcome)}"


def screen_of(folder: Path, outcome: Outcome) -> str:
    """The last screen, with the location of the logs."""
    return render_again(outcome, str(folder), home=os.environ.get("HOME", ""), runs=default_log_dir())


def _end_line(outcome: Outcome) -> str:
    code = f"{outcome.code}: " if outcome.code and outcome.message else ""
    return how_it_ended(outcome.kind.value, outcome.exit_code, code + outcome.message)


def running_job(run: str | None) -> list[RunningAgent]:
    """The agents of the named job on this host, oldest first. Raises NoRunError, ControlRefusedError."""
    entries = running.entries()
    if run is not None and is_folder(run):
        return by_folder(Path(os.path.abspath(run)), entries)
    found = of_one_job(run, entries)
    if not found:
        raise NoRunError(nothing(run, entries))
    return found


def of_one_job(run: str | None, entries: list[RunningAgent]) -> list[RunningAgent]:
    """The entries of the named job, or of the only one. Raises NoRunError for several jobs."""
    found = entries if run is None else matching(entries, run)
    jobs = {entry.job for entry in found}
    if len(jobs) > 1:
        what = f"{len(jobs)} jobs run on this host" if run is None else f"{run!r} means {len(jobs)} jobs on this host"
        raise NoRunError(f"{what}; name one of them (the beginning is enough):\n{job_lines(found)}")
    return found


def run_folders(run: str | None) -> list[Path]:
    """The run folders on this host of a job, running or ended. If several ended runs have the name, the newest counts.
    Raises NoRunError."""
    if run is not None and is_folder(run):
        folder = Path(os.path.abspath(run))
        check_folder(folder)
        return [folder]
    entries = running.entries()
    found = of_one_job(run, entries)
    if not found:
        ended = newest_ended(run)
        if ended is None:
            raise NoRunError(nothing(run, entries))
        return [ended]
    folders = [Path(entry.folder) for entry in found if entry.folder]
    if not folders:
        raise NoRunError(f"{found[0].name} runs with --log-dir /dev/null: it keeps no logs")
    return folders


def ended_run(run: str | None) -> Path | None:
    """The folder of the named run if that run has ended; None: it has not, or it has no folder here."""
    if run is not None and is_folder(run):
        return Path(os.path.abspath(run))
    entries = running.entries()
    if entries if run is None else matching(entries, run):
        return None
    return newest_ended(run)


def is_folder(run: str) -> bool:
    """Whether the text is a folder and not a run id: a run folder, or another path that is no run id."""
    if os.path.exists(os.path.join(run, JOURNAL)):
        return True
    return os.sep in run and not is_run_id(run)


def is_run_id(run: str) -> bool:
    """Whether a running or ended run has exactly this id."""
    if any(entry.run_id == run for entry in running.entries()):
        return True
    name = safe_name(spoken(run))
    return any(run_id_of(folder) == run for folder in recorded_runs() if folder.name.startswith(name))


def matching(entries: Sequence[RunningAgent], run: str) -> list[RunningAgent]:
    """The entries with this run id, or else those whose run id begins with it."""
    exact = [entry for entry in entries if run in (entry.run_id, entry.name)]
    return exact or [entry for entry in entries if entry.run_id.startswith(run) or entry.name.startswith(run)]


def by_folder(folder: Path, entries: Sequence[RunningAgent]) -> list[RunningAgent]:
    """All agents of the job that this folder belongs to, its own first."""
    own = [entry for entry in entries if entry.folder and os.path.realpath(entry.folder) == os.path.realpath(folder)]
    if own:
        return own + [entry for entry in entries if entry.job == own[0].job and entry not in own]
    check_folder(folder)
    path = folder / running.SOCKET_NAME
    if path.exists() and running.listens(str(path)):
        return [unlisted(folder)]
    raise NoRunError(f"the run in {folder} {ended_as(folder)}")


def agent_lives(folder: Path) -> bool:
    """Whether an agent that lives on this host writes this run folder."""
    try:
        return bool(by_folder(folder, running.entries()))
    except NoRunError:
        return False


def check_folder(folder: Path) -> None:
    """Check that this is a run folder. Raises NoRunError, ControlRefusedError."""
    try:
        names = os.listdir(folder)
    except PermissionError:
        try:
            whose = f"belongs to another user (uid {folder.stat().st_uid})"
        except OSError as error:  # a folder above it is not readable either
            whose = f"cannot be read: {error.strerror}"
        raise ControlRefusedError(f"{folder} {whose}") from None
    except OSError as error:
        raise NoRunError(f"{folder} is no run folder: {error.strerror}") from None
    if JOURNAL not in names:
        raise NoRunError(f"{folder} is no run folder: there is no {JOURNAL} in it")


def unlisted(folder: Path) -> RunningAgent:
    """An agent that is not in our list: it had another XDG_RUNTIME_DIR or TMPDIR."""
    return RunningAgent(
        run_id=folder.name,
        endpoint="",
        host="",
        pid=0,
        folder=str(folder),
        socket=str(folder / running.SOCKET_NAME),
        began_epoch_s=0.0,
    )


def newest_ended(run: str | None) -> Path | None:
    """The newest run folder of this name in the default log folder; `run` None: of any name."""
    wanted = "" if run is None else safe_name(spoken(run))
    changed_s = recorded_runs()
    named = [folder for folder in changed_s if folder.name.startswith(wanted)]
    if run is not None and not named:
        named = [folder for folder in changed_s if run_id_of(folder).startswith(run)]
    exact = [folder for folder in named if wanted and wanted in (folder.name, folder.name.rpartition("_")[0])]
    return max(exact or named, key=lambda folder: changed_s[folder], default=None)


def recorded_runs() -> dict[Path, float]:
    """The run folders in the default log folder, and the time (epoch s) of the last change of each."""
    changed_s = {}
    try:
        folders = list(Path(default_log_dir()).iterdir())
    except OSError:
        return {}
    for folder in folders:
        with suppress(OSError):  # no run folder, one that is being removed, or another user's (sudo -E)
            changed_s[folder] = (folder / JOURNAL).stat().st_mtime
    return changed_s


def run_id_of(folder: Path) -> str:
    """The run id in the run's first event, since the folder's name may be another; empty: it cannot be read."""
    try:
        with open(folder / JOURNAL, "rb") as file:
            return str(json.loads(file.readline())["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def nothing(run: str | None, entries: Sequence[RunningAgent]) -> str:
    """The message if no job was found: what may be meant instead."""
    ended = newest_ended(run)
    if run is None:
        last = f"; the newest run here, {ended}, {ended_as(ended)}" if ended else ""
        return f"no job of this user runs on this host{last}{not_read()}"
    if ended:
        return f"{run} is not running on this host: {ended} {ended_as(ended)}"
    known = f"; running jobs:\n{job_lines(entries)}" if entries else ", and no other job of this user"
    return f"no job {run!r} runs on this host{known}{ended_runs_here(entries)}{not_read()}"


def not_read() -> str:
    """A line about entries of jobs that may run and cannot be read; empty: there are none."""
    paths = running.unread()
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"\ncannot read {paths[0]}{more}: of a job of another version of holdfast?" if paths else ""


def ended_runs_here(entries: Sequence[RunningAgent]) -> str:
    """The newest runs whose folders exist, but for those of the running jobs, one per line; empty: there are none."""
    live = {entry.folder for entry in entries}
    ages = {folder: age_s for folder, age_s in recorded_runs().items() if str(folder) not in live}
    newest = sorted(ages, key=lambda folder: -ages[folder])[:RUNS_LISTED_MAX]
    lines = [
        f"  {folder.name}  {duration(max(0.0, time.time() - ages[folder]))} ago{ending(folder)}" for folder in newest
    ]
    more = [f"  … and {len(ages) - len(newest)} more in {default_log_dir()}"] if len(ages) > len(newest) else []
    return "\n".join(["\nended runs with folders here:", *lines, *more]) if lines else ""


def job_lines(entries: Sequence[RunningAgent]) -> str:
    lines = [
        f"  {entry.name}  for {duration(max(0.0, time.time() - entry.began_epoch_s))}, pid {entry.pid}  {entry.script}"
        for entry in entries[:LISTED_MAX]
    ]
    return "\n".join(lines + ([f"  … and {len(entries) - LISTED_MAX} more"] if len(entries) > LISTED_MAX else []))

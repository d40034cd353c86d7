"""The data of one job's page, from what the commands read: the answer to `status`, and the run folders of this machine.

Three parts, each a JSON object: `now` (the state, a second old at most), `story` (generations, incidents, the end) and
`logs` (what can be read here). Columns instead of objects for ranks: 10,000 of them fit into 200 KB. Blocking; every
method is called in a thread, one at a time. Knows files and the control socket; nothing of HTTP.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec

from holdfast.diagnosis.history import Event, history, incidents, timeline
from holdfast.diagnosis.reference import explanations, read_event
from holdfast.diagnosis.screen import between, group, last_step, own_frames, steps_per_s
from holdfast.extensions.stacks.messages import STACKS_S
from holdfast.journal import JOURNAL_NAME
from holdfast.protocol.errors import HoldfastError, NoRunError, SnapshotError
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.rank_progress import JobView, RankView, StacksView, Stage
from holdfast.run_folder import PROFILES
from holdfast.runs.copies_report import copies_of
from holdfast.runs.finding import outcome_of, recorded_runs, run_id_of, running_job
from holdfast.runs.history_data import as_json, history_as_json
from holdfast.runs.log_files import LogFile, files_named
from holdfast.runtime import running
from holdfast.runtime.running import RunningAgent, ask_any
from holdfast.text import spans
from holdfast.train.snapshots.folder import survey

COMPARED = ("total_s", "effective", "training_s", "startup_s", "down_s", "hung_s", "lost_s", "lost_steps")
"""Fields of a history in a summary."""
READ_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of a journal that are read at once."""
PROGRESS_MAX = 2000
"""Records of steps that are kept of one journal; with more, every other one is dropped."""
EVENTS_MAX = 20_000
"""Other events that are kept of one journal, the newest."""
INCIDENTS_MAX = 500
GENERATIONS_MAX = 300
PROFILES_MAX = 200
METRIC_POINTS_MAX = 500
JOBS_MAX = 50
"""Jobs that have ended in the list of all jobs."""
NODES_MAX = 64
"""Nodes whose own generations are drawn."""
SEARCH_S = 10.0
"""Interval of searches for other agents of the job on this machine."""

OUTCOME_S_MAX = 10.0
"""Limit after the end of a job for its outcome to be written."""

Json = dict[str, Any]
STAGE_LETTERS = {
    Stage.STARTING: "s",
    Stage.MEETING: "m",
    Stage.GROUPING: "g",
    Stage.READY: "r",
    Stage.STEPPING: "t",
    Stage.DONE: "d",
    Stage.SPARE: "w",
}
"""One letter per rank: the stages of 10,000 ranks are one string. static/app.js reads it."""
ASKED_OF_A_HOST = {
    "coordinator.drain_asked": "drain",
    "coordinator.excluded": "exclude",
    "coordinator.readmitted": "readmit",
}
"""Events of actions on a host, and the command that causes them."""


class JournalTail:
    """The events of one journal, read as it grows, in bounded memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Json] = []
        self.logs: list[LogFile] = []
        """Log files of all workers that were started here."""
        self._progress = 0
        """Number of progress records in `events`."""
        self._stride = 1
        """One of this many progress records is kept."""
        self._progress_seen = 0
        """Number of progress records that were read."""
        self._offset = 0

    def read(self) -> bool:
        """Read what was written since the last call. Returns whether that is anything."""
        try:
            with open(self.folder / JOURNAL_NAME, "rb") as file:
                file.seek(self._offset)
                data = file.read(READ_BYTES_MAX)
        except OSError:
            return False

        whole = data[: data.rfind(b"\n") + 1]
        # READ_BYTES_MAX without a newline are no event: they are left out, else the reader would stay here for ever.
        self._offset += len(whole) or (len(data) if len(data) == READ_BYTES_MAX else 0)
        for line in whole.splitlines():
            event = read_event(line)
            if event is not None:
                self._take(event)
        if len(self.events) - self._progress > EVENTS_MAX:
            self._drop(len(self.events) - self._progress - EVENTS_MAX)
        return bool(whole)

    def _take(self, event: Json) -> None:
        if event["event"] == "progress":
            self._progress_seen += 1
            if self._progress_seen % self._stride:
                return
            self._progress += 1
        self.events.append(event)
        self.logs += files_named(event, self.folder)

        if self._progress > PROGRESS_MAX:
            kept = [each for each in self.events if each["event"] == "progress"][::2]
            ids = set(map(id, kept))
            self.events = [each for each in self.events if each["event"] != "progress" or id(each) in ids]
            self._progress, self._stride = len(kept), self._stride * 2

    def _drop(self, count: int) -> None:
        """Drop the oldest events, but not the first one, which names the run."""
        first, *rest = self.events
        self.events = [first]
        for each in rest:
            if count > 0 and each["event"] != "progress":
                count -= 1
            else:
                self.events.append(each)


class ShownJob:
    """One job, running or ended."""

    def __init__(self, name: str, folders: Iterable[str | Path] = (), *, pid: int | None = None) -> None:
        """`name` is what commands take as RUN; empty: the only running job. `pid` is an agent of the job: it names the
        job if several have the same name."""
        self.name = name
        self._pid = pid
        self._agents: list[RunningAgent] = []
        """The job's agents on this machine, as of the newest search; empty: none was found, or the job has ended."""
        self._searched_s = -SEARCH_S
        """The time of the last search for agents, by time.monotonic()."""
        self._tails: dict[Path, JournalTail] = {}
        """The journals by run folder."""
        self.outcome: Outcome | None = None
        """The job's outcome; None: it runs, or its outcome is not known."""
        self._ended = False
        """Whether no agent of the job was found any more."""
        self._ended_s = 0.0
        """The time at which `_ended` became true, by time.monotonic()."""
        for folder in folders:
            self.add_folder(folder)

    # ---------------------------------------------------------------- the state

    def now(self) -> Json:
        """The state of the job; without `phase` if no agent answers."""
        self._search()
        if not self._agents:
            return {"at": time.time(), "ended": self._ended or self.outcome is not None, "waiting": not self._ended}
        try:
            _, reply = ask_any(self._agents, "status")
            return {"whole": reply.whole, **now_of(reply.read(JobView))}
        except NoRunError:  # the agents that were found are gone
            self._agents, self._searched_s = [], -SEARCH_S
            self._end()
            return {"at": time.time(), "ended": True}
        except HoldfastError as error:
            return {"at": time.time(), "silent": str(error)}

    def stacks(self, by: str = "") -> Json:
        """The groups of ranks by stack, as they are now. Raises HoldfastError.

        This and `act` may run beside another method, as exceptions: they wait for the job, and change nothing here.
        """
        _, reply = ask_any(self._known(), "stacks", by=by, within_s=STACKS_S)
        return {"at": time.time(), "whole": reply.whole, **stacks_of(reply.read(StacksView))}

    def act(self, question: str, about: Mapping[str, object], *, by: str, within_s: float) -> Json:
        """Pass an action on, as the command of its name does. Raises HoldfastError, also when the job refuses it."""
        _, reply = ask_any(self._known(), question, about, by=by, within_s=within_s)
        return {"whole": reply.whole, **msgspec.json.decode(reply.body)}

    def _known(self) -> list[RunningAgent]:
        agents = self._agents
        if not agents:
            raise NoRunError("the job does not run on this machine")
        return agents

    def _search(self) -> None:
        """Find the agents of the job on this machine, unless that was done lately."""
        if time.monotonic() - self._searched_s < SEARCH_S and (self._agents or self._ended):
            return
        self._searched_s = time.monotonic()
        found: list[RunningAgent] = []
        try:
            if self._pid is None:
                found = running_job(self.name or None)
            else:
                entries = running.entries()
                jobs = {each.job for each in entries if each.pid == self._pid}
                found = [each for each in entries if each.job in jobs]
        except NoRunError:
            self._end()
        except HoldfastError:
            return  # it is stopped, or another user's: the next search may find it
        if found or self._ended:  # an agent that does not register for a moment is not forgotten
            self._agents = found
        for entry in found:
            self.add_folder(entry.folder)

    def _end(self) -> None:
        if not self._ended:
            self._ended, self._ended_s = True, time.monotonic()

    @property
    def over(self) -> bool:
        """Whether nothing more is expected: the job has ended, and its outcome is known or was not written in time."""
        late = self._ended and time.monotonic() - self._ended_s > OUTCOME_S_MAX
        return self.outcome is not None or late

    def profile_file(self, name: str, file: str) -> Path | None:
        """A file of a profile that was taken on this machine; None: there is none. The names come from a browser and
        may be any text, so a path to another folder is refused."""
        found = (Path(folder) / PROFILES / name / file for folder in self.folders)
        names = {name, file}
        safe = not any(each in ("", ".", "..") or "/" in each or "\0" in each for each in names)
        return next((path for path in found if path.is_file()), None) if safe else None

    def add_folder(self, folder: str | Path) -> None:
        path = Path(folder)
        if str(folder) and path not in self._tails:
            self._tails[path] = JournalTail(path)

    @property
    def title(self) -> str:
        """The job's name in addresses."""
        return os.path.basename(self.name) or self.name

    @property
    def folders(self) -> list[Path]:
        return list(self._tails)

    # ---------------------------------------------------------------- the story

    def read(self) -> bool:
        """Read what was added to the journals. Returns whether the story has changed."""
        news = [tail.read() for tail in list(self._tails.values())]  # a list: every journal is read
        if self._ended and self.outcome is None:
            self.outcome = next((end for folder in self.folders if (end := outcome_of(folder))), None)
            news.append(self.outcome is not None)
        return any(news)

    def story(self) -> Json:
        """What happened so far, as one JSON object. Costs time in proportion to the journals."""
        journals = [tail.events for tail in self._tails.values() if tail.events]
        report, past = as_json(timeline(journals)), history(journals) if journals else None
        report["generations"] = report["generations"][-GENERATIONS_MAX:]
        happened = incidents(journals)[-INCIDENTS_MAX:]
        events = [event for journal in journals for event in journal]
        codes = {each.code for each in happened}
        if self.outcome is not None and self.outcome.verdict is not None:
            codes.add(self.outcome.verdict.code)
        return {
            **report,
            "history": history_as_json(past),
            "incidents": msgspec.to_builtins(happened),
            "advice": {code: each.fix for code, each in explanations().items() if code in codes},
            "excluded": list(_excluded(events)),
            "actions": list(_actions(events)),
            "snapshots": list(_snapshots(events)),
            "counts_job": _counts_job(events),
            "metrics": _metrics(events),
            "copies": copies_of(journals),
            "profiles": list(_profiles(events)),
            "outcome": msgspec.to_builtins(self.outcome) if self.outcome is not None else None,
            "logs": logs_of(self.log_files()),
            "lives": {
                node.node: [
                    [course.number, course.ordered_s, course.ready_s, course.ended_s] for course in node.courses
                ]
                for node in (past.nodes[:NODES_MAX] if past is not None else ())
            },
            "curve": [[point.at_s, point.steps] for point in (past.nodes[0].points if past is not None else ())],
        }

    def log_files(self) -> list[LogFile]:
        """All log files of the job here, including those that do not exist: a worker may not have been started yet."""
        return [file for tail in list(self._tails.values()) for file in tail.logs]


def _excluded(events: Sequence[Event]) -> Iterable[Json]:
    """Hosts whose exclusion has begun and was not ended by a user; it may be over."""
    found: dict[str, Json] = {}
    for event in sorted(events, key=lambda each: each["time"]):
        host = event.get("host", "")
        if event["event"] == "coordinator.excluded":
            for_s, by = event.get("for_s", 0.0), event.get("by", "")
            found[host] = {"at": event["time"], "host": host, "for_s": for_s, "by": by}
        elif event["event"] == "coordinator.readmitted":
            found.pop(host, None)
    return found.values()


def _actions(events: Sequence[Event]) -> Iterable[Json]:
    """The actions that users asked for, each with its origin."""
    for event in events:
        by = event.get("by", "")
        match event["event"]:
            case "coordinator.quit":
                what = "stop" if event.get("drain", True) else "kill"
            case "coordinator.stacks_asked":
                what = "stacks"
            case "coordinator.save_asked":
                what = "save"
            case "coordinator.profile_asked":
                what = f"profile {spans(event.get('ranks', ()))}"
            case name if by and name in ASKED_OF_A_HOST:
                what = f"{ASKED_OF_A_HOST[name]} {event.get('host')}"
            case _:
                continue
        yield {"at": event["time"], "what": what, "by": by}


def _profiles(events: Sequence[Event]) -> Iterable[Json]:
    """The newest PROFILES_MAX profiles that were taken on the nodes of these journals."""
    taken = [event for event in events if event["event"] == "profile"]
    for event in sorted(taken, key=lambda each: each["time"])[-PROFILES_MAX:]:
        files = [os.path.basename(file) for file in event.get("files", ())]
        about = {name: event.get(name, "") for name in ("name", "rank", "why")}
        yield {"at": event["time"], **about, "files": files}


def _counts_job(events: Sequence[Event]) -> bool:
    """Whether steps are those of the whole job, which the script reports; otherwise each generation counts from 0."""
    at = [event["at"] for event in events if event["event"] == "progress" and event.get("at")]
    return not at or min(at[-1]) >= 0


def _metrics(events: Sequence[Event]) -> Json:
    """The numbers that the script gave to `snaps.step()`, as they were at each snapshot on disk.

    Returns their names, which are those of the newest snapshot, and at most METRIC_POINTS_MAX rows of time, step and
    values.
    """
    saved = [each for each in events if each["event"] == "snapshot" and each.get("metrics")]
    saved.sort(key=lambda each: each["time"])
    names = list(saved[-1]["metrics"]) if saved else []
    while len(saved) > METRIC_POINTS_MAX:
        saved = saved[::-2][::-1]  # keeps the newest
    rows = [[each["time"], each.get("step"), *(each["metrics"].get(name) for name in names)] for each in saved]
    return {"names": names, "rows": rows}


def _snapshots(events: Sequence[Event]) -> Iterable[Json]:
    """The snapshot folders of the job: the newest snapshot that the saver reported, and what is there now."""
    newest: dict[str, Event] = {}
    for event in events:
        if event["event"] == "snapshot" and "path" in event:
            newest[os.path.dirname(event["path"])] = event
    for folder, event in newest.items():
        saved = {"at": event["time"], **{name: event.get(name) for name in ("step", "took_s", "stall_s")}}
        if "://" in folder:  # listing an object store costs requests, and credentials that only the workers may have
            yield {"folder": folder, "newest": saved, "count": None, "problems": 0}
            continue
        try:
            found = survey(folder)
        except SnapshotError as error:
            yield {"folder": folder, "newest": saved, "error": str(error)}
            continue
        valid = found.newest_valid
        size = valid.manifest.size_bytes if valid is not None else 0
        yield {
            "folder": folder,
            "newest": {**saved, "size": size} if valid is not None else None,
            "count": len(found.committed),
            "problems": len(found.problems) + len(found.quarantined),
        }


# --- views as JSON ----------------------------------------------------------------------------------------------------


def encoded(value: Any) -> bytes:
    """The value as JSON. Names of files need not be valid text: msgspec refuses the surrogates by which Python writes
    them, json does not."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def now_of(view: JobView) -> Json:
    """The view as JSON, with its ranks in columns, sorted by rank."""
    with_node = [(rank, index) for index, node in enumerate(view.nodes) for rank in node.ranks]
    with_node.sort(key=lambda each: each[0].rank)
    ranks = [rank for rank, _ in with_node]
    step_ms = [round(rank.step_s * 1e3, 2) for rank in ranks]
    known = sorted(each for each in step_ms if each > 0)
    return {
        "at": time.time(),
        **{name: value for name, value in msgspec.structs.asdict(view).items() if name != "more"},
        **view.more,
        **_step_fields(ranks),
        "counts_job": all(rank.counts_job for rank in ranks),
        "median_ms": median(known) if known else None,
        "p99_ms": quantiles(known, n=100, method="inclusive")[98] if len(known) > 1 else None,
        "own_ms": median([rank.own_s * 1e3 for rank in ranks if rank.step_s > 0]) if known else None,
        "nodes": [
            {
                "host": node.host,
                "group_rank": node.group_rank,
                "state": node.state,
                "heard_s": node.heard_s,
                "ranks": spans(rank.rank for rank in node.ranks),
                **_step_fields(node.ranks),
                **node.more,
            }
            for node in view.nodes
        ],
        "ranks": {
            "rank": [rank.rank for rank in ranks],
            "node": [index for _, index in with_node],
            "local": [rank.local_rank for rank in ranks],
            "pid": [rank.pid for rank in ranks],
            "stage": "".join(STAGE_LETTERS[rank.stage] for rank in ranks),
            "steps": [rank.steps for rank in ranks],
            "step_ms": step_ms,
            "own_ms": [round(rank.own_s * 1e3, 2) for rank in ranks],
            "age_s": [round(rank.age_s, 1) for rank in ranks],
        },
        "standing": {rank.rank: [rank.standing.value, rank.place] for rank in ranks if rank.standing is not None},
    }


def _step_fields(ranks: Sequence[RankView]) -> Json:
    return {
        "step": between([rank.steps for rank in ranks if rank.stage is not Stage.SPARE]),
        "steps_s": steps_per_s(ranks),
        "last_step": last_step(ranks),
    }


def stacks_of(view: StacksView) -> Json:
    """The groups of `holdfast stacks`, with all frames, each marked whether the command shows it without --full."""
    groups = []
    for each in group(view):
        own = {id(frame) for frame in own_frames(each.frames)}
        groups.append(
            {
                "ranks": spans(rank.rank for rank in each.ranks),
                "count": len(each.ranks),
                "hosts": sorted({rank.host for rank in each.ranks}),
                "place": each.place,
                "source": sorted({rank.source for rank in each.ranks if rank.source}),
                "notes": [f"rank {rank.rank}: {rank.note}" for rank in each.ranks if rank.note],
                "frames": [[frame.function, f"{frame.file}:{frame.line}", id(frame) in own] for frame in each.frames],
            }
        )
    return {"generation": view.generation, "world_size": view.world_size, "groups": groups, "missing": view.silent}


def logs_of(files: Iterable[LogFile]) -> Json:
    """The ranks whose output is here, by generation."""
    found: dict[int, set[int]] = {}
    for file in files:
        found.setdefault(file.generation, set()).add(file.rank)
    return {str(number): sorted(ranks) for number, ranks in sorted(found.items())[-GENERATIONS_MAX:]}


def summary_of(name: str, folder: str) -> Json:
    """This run in numbers that can be compared with another run's. Reads the journal of this node."""
    source = ShownJob(name, [folder])
    while source.read():
        pass
    source.outcome = outcome_of(Path(folder))
    story, end = source.story(), source.outcome
    past, generations = story["history"] or {}, story["generations"]
    verdict = end.verdict if end is not None else None
    values = story["metrics"]["rows"][-1][2:] if story["metrics"]["rows"] else []
    return {
        "name": name,
        "run_id": story["run_id"],
        "end": end.kind.value if end is not None else "",
        "code": verdict.code if verdict is not None else "",
        "cause": verdict.cause if verdict is not None else end.message if end is not None else "",
        "began": past["stretches"][0]["from_epoch_s"] if past.get("stretches") else None,
        "steps": story["curve"][-1][1] if story["curve"] else None,
        "counts_job": story["counts_job"] or len(generations) < 2,
        "ranks": generations[-1]["world_size"] if generations else None,
        "generations": len(generations),
        "restarts": generations[-1]["restart_count"] if generations else None,
        "start_s": generations[0]["total_s"] if generations else None,
        "failures": sorted(each["code"] for each in story["incidents"] if each["what"] == "failure"),
        "metrics": dict(zip(story["metrics"]["names"], values, strict=False)),
        **{each: past.get(each) for each in COMPARED},
    }


def jobs_here() -> list[Json]:
    """The jobs of this user on this machine: running ones first, then the newest that have ended."""
    found: dict[str, Json] = {}
    for entry in running.entries():
        name = os.path.basename(entry.folder) if entry.folder else entry.run_id
        found[name] = {
            "name": name,
            "run_id": entry.run_id,
            "folder": entry.folder,
            "at": entry.began_epoch_s,
            "script": entry.script,
            "running": True,
        }
    kept = recorded_runs()
    for folder in sorted(kept, key=lambda folder: -kept[folder])[:JOBS_MAX]:
        if folder.name in found:
            continue
        outcome = outcome_of(folder)
        verdict = outcome.verdict if outcome is not None else None
        found[folder.name] = {
            "name": folder.name,
            "run_id": run_id_of(folder),
            "folder": str(folder),
            "at": kept[folder],
            "running": False,
            "end": outcome.kind.value if outcome is not None else "unknown",
            "cause": verdict.cause if verdict is not None else outcome.message if outcome is not None else "",
            "code": verdict.code if verdict is not None else "",
        }
    return list(found.values())

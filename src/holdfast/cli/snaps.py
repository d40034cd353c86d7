"""`holdfast snaps ls|verify|prune|unmark|export`: manages a snapshot folder, with or without a job that writes to it.

Knows the options and the output; holdfast.train.snapshots knows the snapshots. torch is not imported: the export is a
separate process.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from holdfast import memory_folder
from holdfast.cli.printing import Parser, print_json, print_table
from holdfast.protocol.errors import SnapshotDamagedError, SnapshotError, SnapshotGoneError, UsageError
from holdfast.text import duration
from holdfast.train.snapshots import changes, disk, folder, lease, lives
from holdfast.train.snapshots.changes import Keep, Pruned
from holdfast.train.snapshots.copy_service import all_slots
from holdfast.train.snapshots.folder import Snapshot, Survey
from holdfast.train.snapshots.layout import MANIFEST, parse_name
from holdfast.train.snapshots.remote import Location, RemotePath, location_of

EXIT_DAMAGED = 1
FORMATS = ("torch", "dcp", "safetensors")
NOT_FINITE = "has values that are not finite"


class Result(NamedTuple):
    """What reading a snapshot back has shown."""

    path: Location
    error: SnapshotError | None = None
    """None: it is valid."""
    finite: bool | None = None


class SnapshotData(TypedDict):
    """A valid snapshot."""

    name: str
    step: int
    attempt: int
    ranks: int
    size_bytes: int
    saved_unix_s: float
    metrics: dict[str, float]
    finite: bool | None
    """Whether all values are finite; null: unknown."""


class DamagedData(TypedDict):
    """A snapshot that is not valid, and why."""

    name: str
    error: str


class SuspectData(TypedDict):
    """A snapshot that is marked suspect, and why."""

    name: str
    why: str


class StateData(TypedDict):
    """A state in this host's memory."""

    step: int
    rank: int
    copy: bool
    """It is a copy of another node's."""
    size_bytes: int
    age_s: float
    run: str


class FolderData(TypedDict):
    """`ls`: all that is in the folder."""

    folder: str
    committed: list[SnapshotData]
    problems: list[DamagedData]
    debris: list[str]
    """Remains of unfinished saves."""
    quarantined: list[str]
    suspects: list[SuspectData]
    lease: str | None
    """The process that used it last; null: unknown."""
    memory: list[StateData]


class VerifiedData(TypedDict):
    """The result of reading one snapshot."""

    name: str
    valid: bool
    error: str | None
    finite: bool | None
    """Whether all values are finite, as its writer has noted; null: unknown."""


class VerifiedFolder(TypedDict):
    """`verify`."""

    verified: list[VerifiedData]


class PrunedData(TypedDict):
    """`prune`: what was deleted, or would be with --dry-run."""

    dry_run: bool
    kept: list[str]
    deleted: list[str]
    damaged: list[DamagedData]


class UnmarkedData(TypedDict):
    """`unmark`."""

    unmarked: list[str]


class ExportedData(TypedDict):
    """`export`."""

    step: int
    to: str
    format: str


JSON_FORMS = {"snaps": ((FolderData,), (VerifiedFolder,), (PrunedData,), (UnmarkedData,), (ExportedData,))}


def main(argv: Sequence[str]) -> int:
    """Run `holdfast snaps` with these arguments. Returns the exit status. Raises HoldfastError."""
    chosen = parser().parse_args(argv)
    place = location_of(chosen.folder)
    chosen.folder = str(place)
    try:
        there = place.sizes() if isinstance(place, RemotePath) else place.is_dir()
    except OSError as error:
        raise SnapshotError(f"{chosen.folder}: {error.strerror}") from error
    if not there:
        raise SnapshotError(f"{chosen.folder}: no such folder")
    if MANIFEST in there if isinstance(there, dict) else (Path(chosen.folder) / MANIFEST).exists():
        whole = place if isinstance(place, RemotePath) else place.resolve()
        raise SnapshotError(f"{chosen.folder} is one snapshot; give its folder, {whole.parent}")
    status: int = chosen.run(chosen)
    return status


def parser() -> Parser:
    """The command line."""
    top = Parser(prog="holdfast snaps", description="Manage a folder of snapshots.")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Any, text: str) -> Parser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("folder", metavar="FOLDER", help="the snapshot folder or URL, as given to Snapshots(...)")
        made.add_json()
        made.set_defaults(run=run)
        return made

    command("ls", list_all, "list the snapshots; reads only manifests")
    check = command("verify", verify, "read every byte and check its digest; exit status 1 if anything is damaged")
    check.add_argument("--step", type=int, help="only this step")
    check.add_argument("--quarantine", action="store_true", help="move damaged snapshots aside")
    prune = command("prune", prune_folder, "delete snapshots, after reading back those that are kept")
    prune.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N")
    prune.add_argument("--keep-every", metavar="TIME", help="keep one for every 30min, 6h, 1d ...")
    prune.add_argument("--keep-steps", type=int, metavar="N", help="keep one for every N steps")
    prune.add_argument("--keep-best", metavar="NAME:min|max[:N]", help="keep the best N by a metric")
    prune.add_argument("--debris", action="store_true", help="delete the remains of unfinished saves")
    prune.add_argument("--quarantined", action="store_true", help="delete quarantined snapshots")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be done")
    marks = command("unmark", remove_marks, "use suspect snapshots again: remove their marks")
    marks.add_argument("--step", type=int, help="only this step")
    export = command("export", export_snapshot, "write a snapshot in another format; needs torch")
    export.add_argument("--step", type=int, help="the step; by default the newest whose values are finite")
    export.add_argument("--to", required=True, metavar="PATH", help="file or folder to create")
    export.add_argument("--format", required=True, choices=FORMATS, help=", ".join(FORMATS))
    return top


def list_all(chosen: argparse.Namespace) -> int:
    """Run `ls`: print everything in the folder."""
    found = folder.survey(chosen.folder)
    has = lease.owner(chosen.folder)
    memory = in_memory(found.path)
    if chosen.json:
        print_json({**survey_json(found), "lease": str(has) if has else None, "memory": memory})
        return 0
    rows: list[tuple[str, ...]] = [("STEP", "ATTEMPT", "RANKS", "SIZE", "SAVED", "METRICS")]
    committed = sorted((*found.committed, *found.suspects), key=lambda each: each.key)
    rows += [row(snapshot) for snapshot in committed]
    if committed:
        print_table(rows)
    else:
        print(f"{chosen.folder} holds no snapshot")
    print_rest(found)
    if memory:
        print(f"\nin memory on {socket.gethostname()}:")
        print_table([("STEP", "RANK", "OF", "SIZE", "AGE", "RUN"), *map(memory_row, memory)])
    if has:
        print(f"last used by {has}")
    return 0


def in_memory(path: Location) -> list[dict[str, Any]]:
    """The states of this folder's job that this host has in memory: those of its own ranks, and copies of others'."""
    now_s, found = time.time(), []
    for place, _ in memory_folder.private_folders(memory_folder.ROOT):
        for inside, slot in all_slots(place):
            if slot.request is not None and same_place(slot.request.folder, path):
                run = place.name.split("-", 2)[2].rpartition("-")[0]
                age_s = round(max(0.0, now_s - slot.unix_s), 1)
                about = {"step": slot.step, "rank": slot.rank, "copy": inside != place, "size_bytes": len(slot.data)}
                found.append({**about, "age_s": age_s, "run": run})
    return sorted(found, key=lambda each: (each["step"], each["rank"], each["copy"]))


def same_place(saved_to: str, path: Location) -> bool:
    return saved_to == str(path) or (isinstance(path, Path) and os.path.realpath(saved_to) == os.path.realpath(path))


def size_text(count: int) -> str:
    """A number of bytes as a user reads it: `41.0 kB`, `1.2 MB`."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def memory_row(state: dict[str, Any]) -> tuple[str, ...]:
    size, of = size_text(state["size_bytes"]), "another node" if state["copy"] else "this node"
    return str(state["step"]), str(state["rank"]), of, size, duration(state["age_s"]), state["run"]


def verify(chosen: argparse.Namespace) -> int:
    """Run `verify`: read all snapshots, or those of one step, back."""
    found = folder.survey(chosen.folder)
    results = [Result(each.path, each.error) for each in found.problems if chosen.step in (None, each.key.step)]
    for snapshot in (*found.committed, *found.suspects):
        if chosen.step in (None, snapshot.step):
            results += read_back(snapshot)
    if not results:
        raise SnapshotError(f"{chosen.folder}: no snapshot{'' if chosen.step is None else f' of step {chosen.step}'}")
    results.sort(key=lambda result: result[0].name)
    if chosen.quarantine:
        set_aside(chosen.folder, results)
    if chosen.json:
        verified = [
            VerifiedData(name=each.path.name, valid=not each.error, error=error_text(each.error), finite=each.finite)
            for each in results
        ]
        print_json(VerifiedFolder(verified=verified))
    else:
        for each in results:
            valid = "valid" if each.finite is not False else f"valid ({NOT_FINITE})"
            print(f"{each.path.name}  {error_text(each.error) or valid}")
    return EXIT_DAMAGED if any(each.error for each in results) else 0


def read_back(snapshot: Snapshot) -> list[Result]:
    """Read a snapshot back. Returns nothing if it was deleted meanwhile."""
    try:
        folder.verify(snapshot)
    except SnapshotGoneError:
        return []
    except SnapshotError as error:
        return [Result(snapshot.path, error, snapshot.manifest.finite)]
    return [Result(snapshot.path, finite=snapshot.manifest.finite)]


def prune_folder(chosen: argparse.Namespace) -> int:
    """Run `prune`: delete snapshots that need not stay. It has the folder's lease, so no job can save meanwhile."""
    keep = asked_keep(chosen)
    if keep is None and not chosen.debris and not chosen.quarantined:
        raise UsageError(
            "holdfast snaps prune: give at least one of --keep-last N (or another --keep), --debris, --quarantined"
        )
    if chosen.dry_run:
        return report(chosen, *prune_now(chosen, keep))
    with lease.acquire(chosen.folder, ""):
        return report(chosen, *prune_now(chosen, keep))


def remove_marks(chosen: argparse.Namespace) -> int:
    """Run `unmark`: remove the marks of suspect snapshots. It has the folder's lease: a job judges them at its
    start."""
    with lease.acquire(chosen.folder, ""):
        found = folder.survey(chosen.folder)
        keys = [key for key in sorted(found.marks) if chosen.step in (None, key.step)]
        lives.unmark(found.path, keys)
    if chosen.json:
        print_json(UnmarkedData(unmarked=[key.name for key in keys]))
    else:
        which = "" if chosen.step is None else f" of step {chosen.step}"
        print("\n".join(f"unmarked  {key.name}" for key in keys) or f"{chosen.folder} has no suspect snapshot{which}")
    return 0


def export_snapshot(chosen: argparse.Namespace) -> int:
    """Run `export`: start a process that imports torch. Returns its exit status."""
    if chosen.step is None and folder.choose(folder.survey(chosen.folder)) is None:
        raise SnapshotError(f"{chosen.folder}: no snapshot")
    command = [sys.executable, "-m", "holdfast.train.export", chosen.folder, "--to", chosen.to]
    command += ["--format", chosen.format, *(() if chosen.step is None else ("--step", str(chosen.step)))]
    # With --json only our JSON goes to stdout. The process says which snapshot it has chosen: it can look into them.
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE if chosen.json else None, text=True)
    if chosen.json and done.returncode == 0:
        sys.stderr.write(done.stdout)
        named = parse_name(done.stdout.splitlines()[-1].partition(" ")[0])
        assert named is not None
        print_json(ExportedData(step=named.key.step, to=chosen.to, format=chosen.format))
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def asked_keep(chosen: argparse.Namespace) -> Keep | None:
    """The --keep-... options; None: none is given."""
    asked = (chosen.keep_last, chosen.keep_every, chosen.keep_steps, chosen.keep_best)
    if all(each is None for each in asked):
        return None
    last = 1 if chosen.keep_last is None else chosen.keep_last
    return Keep(last=last, every=chosen.keep_every, every_steps=chosen.keep_steps, best=asked_best(chosen.keep_best))


def asked_best(text: str | None) -> tuple[str, str, int] | None:
    """Parse NAME:min|max[:N]; the name may contain colons."""
    if text is None:
        return None
    name, _, sense = text.rpartition(":")
    count = "1"
    if sense.isdigit():
        count, (name, _, sense) = sense, name.rpartition(":")
    if not name:
        raise UsageError(f"--keep-best {text}: write NAME:min, NAME:max or NAME:min:3")
    return name, sense, int(count)


def prune_now(chosen: argparse.Namespace, keep: Keep | None) -> tuple[Pruned, list[Location]]:
    """Delete, or with --dry-run only determine, what is to be deleted. Returns these snapshots and other folders."""
    done = Pruned((), (), ())
    if keep is not None:
        done = changes.prune(chosen.folder, keep, dry_run=chosen.dry_run)
    found = folder.survey(chosen.folder)
    others = list(found.debris) if chosen.debris else []
    if chosen.debris and not chosen.dry_run:
        others = folder.clear_debris(found)
    if chosen.quarantined:
        others += found.quarantined
        if not chosen.dry_run:
            for path in found.quarantined:
                disk.remove(path)
    return done, others


def report(chosen: argparse.Namespace, done: Pruned, others: list[Location]) -> int:
    """Print what `prune` did."""
    if chosen.json:
        print_json(
            {
                "dry_run": chosen.dry_run,
                "kept": [snapshot.path.name for snapshot in done.kept],
                "deleted": [path.name for path in (*done.deleted, *others)],
                "damaged": [{"name": path.name, "error": error_text(error)} for path, error in done.damaged],
            }
        )
    else:
        verb = "would delete" if chosen.dry_run else "deleted"
        for path, error in done.damaged:
            print(f"damaged  {path.name}  {error_text(error)}")
        for snapshot in done.kept:
            print(f"kept  {snapshot.path.name}")
        for path in (*done.deleted, *others):
            print(f"{verb}  {path.name}")
    return EXIT_DAMAGED if done.damaged else 0


def set_aside(path: str, results: Sequence[Result]) -> None:
    """Quarantine damaged snapshots, but not those that only could not be read."""
    damaged = [each for each in results if isinstance(each.error, SnapshotDamagedError)]
    if damaged:
        with lease.acquire(path, ""):
            for each in damaged:
                folder.quarantine(each.path, str(each.error))


def error_text(error: SnapshotError | None) -> str | None:
    """An error with its code, as one line; None: there is none."""
    return None if error is None else f"{error.code}: {' '.join(str(error).split())}"


def row(snapshot: Snapshot) -> tuple[str, ...]:
    """The columns of one snapshot."""
    manifest = snapshot.manifest
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_unix_s))
    metrics = " ".join(f"{name}={value:.6g}" for name, value in sorted(manifest.metrics.items()))
    size = size_text(manifest.size_bytes)
    if manifest.finite is False:
        metrics = f"{metrics} ({NOT_FINITE})".lstrip()
    return str(manifest.step), str(manifest.attempt), str(manifest.world), size, saved, metrics


def survey_json(found: Survey) -> dict[str, Any]:
    """A survey as plain data."""
    return {
        "folder": str(found.path),
        "committed": [
            {
                "name": snapshot.path.name,
                "step": snapshot.step,
                "attempt": snapshot.key.attempt,
                "ranks": snapshot.manifest.world,
                "size_bytes": snapshot.manifest.size_bytes,
                "saved_unix_s": snapshot.manifest.saved_unix_s,
                "metrics": snapshot.manifest.metrics,
                "finite": snapshot.manifest.finite,
            }
            for snapshot in found.committed
        ],
        "problems": [{"name": problem.path.name, "error": error_text(problem.error)} for problem in found.problems],
        "debris": [path.name for path in found.debris],
        "quarantined": [path.name for path in found.quarantined],
        "suspects": [{"name": key.name, "why": lives.why_marked(found.path, key)} for key in sorted(found.marks)],
    }


def print_rest(found: Survey) -> None:
    """Print what the folder contains besides valid snapshots."""
    for problem in found.problems:
        print(f"not valid    {problem.path.name}  {error_text(problem.error)}")
    for path in found.debris:
        print(f"unfinished   {path.name}")
    for path in found.quarantined:
        print(f"quarantined  {path.name}")
    for key in sorted(found.marks):
        print(f"suspect      {key.name}  {lives.why_marked(found.path, key)}")

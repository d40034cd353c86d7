"""What torchrun did with a line, kept as text, so that it does not have to be started for each comparison.

A recording holds what a run left (exit code, console, files, what the workers saw) without what belongs to the machine
and the moment: paths have names in braces, and of a worker's view only what differs from the same probe started without
a launcher. Replaying puts today's values in. `make record-torchrun` writes recordings, `make test-torch` compares them
with the installed torchrun.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

Probe = dict[str, Any]

RECORDED = Path(__file__).parent / "recorded"
SCRIPTS = Path(__file__).parent / "scripts"
TORCH = "2.13.0"
"""The version whose recording `make test` compares with."""


class Mode(Enum):
    """Where torchrun's side of a comparison comes from."""

    REPLAY = "replay"
    LIVE = "live"
    RECORD = "record"


@dataclass
class Book:
    """What was recorded for one test file, by test: its runs of torchrun, in the order in which it starts them."""

    path: Path
    runs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, version: str, name: str) -> Book:
        path = RECORDED / version / f"{name}.json"
        return cls(path, json.loads(path.read_text())["runs"] if path.exists() else {})

    def write(self, version: str) -> None:
        head = {"torch": version, "python": platform.python_version(), "date": f"{datetime.date.today()}"}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**head, "runs": dict(sorted(self.runs.items()))}, indent=1)
        self.path.write_text(text + "\n")


@dataclass(frozen=True)
class Places:
    """The paths and ports of one run, by the names that stand for them in a recording."""

    names: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path, port: str | None) -> Places:
        named = {
            "{folder}": str(folder),
            "{root}": str(folder.parent),
            "{scripts}": str(SCRIPTS),
            "{python}": sys.executable,
            "{site}": sysconfig.get_path("purelib"),
            "{stdlib}": sysconfig.get_path("stdlib"),
            "{prefix}": sys.prefix,
            "{base}": sys.base_prefix,
            "{repository}": str(Path(__file__).parents[2]),
        }
        return cls({**named, **({"{port}": port} if port else {})})

    def hide(self, text: str) -> str:
        """The longest path first: one may contain another."""
        for name, path in sorted(self.names.items(), key=lambda each: -len(each[1])):
            text = text.replace(path, name)
        return text

    def show(self, text: str) -> str:
        for name, path in self.names.items():
            text = text.replace(name, path)
        return text


CHANCE = [
    (re.compile(r"(?<=holdfast/runs/)[^/\"\\]+"), "<run>"),  # of a launcher that torchrun has started: ours
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "<id>"),
    (re.compile(r"_[a-z0-9_]{8}(?=/|\\?\"|$)"), "_<chance>"),
    (re.compile(r" at 0x[0-9a-f]+"), ""),
    (re.compile(r"pipe:\[\d+\]"), "pipe"),
    # torch imports pynvml where it is installed, and that imports ctypes.util
    (re.compile(r'"(pynvml|ctypes\.util)", '), ""),
    (re.compile(r"/proc/\d+/fd/\d+@\d+"), "<board>"),
    (re.compile(r"/dev/shm/holdfast-[\w-]+@"), "<saver>@"),
    (re.compile(r"pytest-\d+/(popen-gw\d+/)?(?=home)"), ""),
]
"""What differs from run to run, and what stands for it."""

BY_CHANCE = {"MASTER_PORT", "TORCHINDUCTOR_CACHE_DIR"}
"""The second is set by torch's compiler, where something has imported it before torchrun starts its workers."""


def _of_torchrun(variable: str) -> bool:
    """Variables of holdfast are in a recording where torchrun has started it. They change with holdfast's versions."""
    return variable not in BY_CHANCE and not variable.startswith("HOLDFAST_")


def fingerprint(entry: Mapping[str, Any]) -> object:
    """What two runs of one line have in common: all but what is drawn, the order of lines and the clock."""
    probes = {
        rank: {**kept, "env": {name: value for name, value in kept["env"].items() if _of_torchrun(name)}}
        for rank, kept in entry["probes"].items()
    }
    text = json.dumps([entry["code"], list(entry["files"]), list(entry["folders"]), probes], sort_keys=True)
    for pattern, name in CHANCE:
        text = pattern.sub(name, text)
    code, files, folders, probes = json.loads(text)
    return code, sorted(files), sorted(folders), probes


_bare: dict[frozenset[tuple[str, str]], Probe] = {}


def bare(environment: Mapping[str, str], folder: Path) -> Probe:
    """What the probe sees when no launcher starts it, in an environment; one start of Python for each environment."""
    settings = {name: value for name, value in environment.items() if name.startswith(("PYTHON", "LANG", "LC_"))}
    key = frozenset((name, value) for name, value in settings.items() if name != "PYTHONPATH")
    if key not in _bare:
        place = folder / "bare"
        place.mkdir()
        subprocess.run(
            [sys.executable, "-u", str(SCRIPTS / "probe.py")],
            env={**environment, "PROBE_DIR": str(place), "RANK": "bare"},
            cwd=SCRIPTS,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
        (report,) = place.glob("*.json")
        _bare[key] = json.loads(report.read_text())
        report.unlink()
        place.rmdir()
    return _bare[key]


def without(probe: Probe, ground: Probe, environment: Mapping[str, str]) -> Probe:
    """The facts of `probe` that are not those of `ground`; of its variables and modules, what was added and removed."""
    kept = {
        name: value for name, value in probe.items() if name not in ("env", "modules") and value != ground.get(name)
    }
    env = probe["env"]
    kept["env"] = {name: value for name, value in env.items() if environment.get(name) != value}
    kept["env removed"] = sorted(environment.keys() - env.keys())
    kept["modules"] = sorted(set(probe["modules"]) - set(ground["modules"]))
    kept["modules missing"] = sorted(set(ground["modules"]) - set(probe["modules"]))
    return kept


def restored(kept: Probe, ground: Probe, environment: Mapping[str, str]) -> Probe:
    """The probe of which `without` made `kept`, with the facts of this machine."""
    probe = {**ground, **kept}
    removed, missing = set(probe.pop("env removed")), set(probe.pop("modules missing"))
    inherited = {name: value for name, value in environment.items() if name not in removed}
    probe["env"] = {**inherited, **kept["env"]}
    probe["modules"] = sorted((set(ground["modules"]) - missing) | set(kept["modules"]))
    return probe


def record(folder: Path, code: int, environment: Mapping[str, str], port: str | None) -> dict[str, Any]:
    """What a run that ended with `code` left in `folder`."""
    places = Places.of(folder, port)
    ground = bare(environment, folder)
    probes = {
        path.stem: without(json.loads(path.read_text()), ground, environment)
        for path in sorted((folder / "probes").glob("*.json"))
    }
    below = [path for path in sorted(folder.rglob("*")) if folder / "probes" not in (path, path.parent)]
    entry = {
        "code": code,
        "folders": {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in below if path.is_dir()},
        "files": {
            str(path.relative_to(folder)): path.read_text(errors="surrogateescape") for path in below if path.is_file()
        },
        "probes": probes,
    }
    hidden: dict[str, Any] = json.loads(places.hide(json.dumps(entry)))
    return hidden


def replay(entry: Mapping[str, Any], folder: Path, environment: Mapping[str, str], port: str | None) -> int:
    """Leave in `folder` what the recorded run left; return its exit code."""
    shown = json.loads(Places.of(folder, port).show(json.dumps(entry)))
    for name, mode in shown["folders"].items():
        (folder / name).mkdir(exist_ok=True)
        os.chmod(folder / name, mode)
    for name, text in shown["files"].items():
        (folder / name).write_text(text, errors="surrogateescape")
    if shown["probes"]:
        ground = bare(environment, folder)
        for name, kept in shown["probes"].items():
            probe = restored(kept, ground, environment)
            (folder / "probes" / f"{name}.json").write_text(json.dumps(probe))
    return int(shown["code"])

"""The first soak: the same faults for each launcher in turn, then the checker, then the table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.report import facts
from soak import checker, ledger, report
from soak.disk import mounted
from soak.figures import figures
from soak.launchers import Launcher
from soak.rig import NODES, Rig
from soak.schedule import Fault, schedule
from tests.network.hosts import PretendHosts

DISK_MIB = 256
SAMPLES = 4800
"""Of training.py."""


def soak(
    launchers: list[Launcher],
    script: Path,
    seed: int,
    minutes: float,
    gap_s: float,
    folder: Path,
    results: Path | None,
) -> int:
    """The exit status: 0 when holdfast broke no promise. What was broken by others is only told."""
    faults = schedule(seed, minutes * 60, NODES, gap_s)
    print(f"seed {seed}: {len(faults)} faults in {minutes:g} min, mean gap {gap_s:g} s", flush=True)
    outcomes = [one(launcher, script, faults, seed, minutes * 60, folder / launcher.name) for launcher in launchers]
    about = {**facts(), "seed": seed, "minutes": minutes, "mean_gap_s": gap_s, "script": script.name}
    print(report.table(outcomes))
    if results is not None:
        print(f"written to {report.write(outcomes, about, results).name}")
    bad = [outcome for outcome in outcomes if outcome.launcher == "holdfast" and outcome.violations]
    return 1 if bad else 0


def one(launcher: Launcher, script: Path, faults: list[Fault], seed: int, seconds: float, site: Path) -> report.Outcome:
    """One launcher's run. What it wrote stays in `site` if something is wrong with it."""
    site.mkdir(parents=True)
    (site / "schedule.json").write_text(json.dumps([fault.as_json() for fault in faults], indent=1))
    print(f"{launcher.name}: {seconds / 60:g} minutes of chaos in {site}", flush=True)
    with mounted(site, DISK_MIB) as disk:
        with PretendHosts(NODES, site / "hosts") as hosts:
            Rig(site, hosts, disk, launcher, script, seed).run(faults, seconds)
        record = ledger.read(site, SAMPLES)
        shutil.copytree(site / "disk" / "logs", site / "logs", ignore=shutil.ignore_patterns("*.sock"))
    outcome = report.Outcome(launcher.name, figures(record), checker.check(record))
    for violation in outcome.violations:
        print(f"{launcher.name}: VIOLATION {violation}", flush=True)
    print(
        f"{launcher.name}: {outcome.figures.share:.1%} effective, {outcome.figures.steps} steps, "
        f"{len(outcome.violations)} violations",
        flush=True,
    )
    return outcome

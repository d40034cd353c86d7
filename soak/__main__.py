"""The soaks' command line: takes a mount namespace of its own, so that nothing stays on the machine, and runs one of them.

python -m soak chaos --minutes 20 --seed 1 --launchers holdfast,torchrun-tuned,torchrun
python -m soak patience --minutes 60
python -m soak kills --minutes 60
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import end_on_signals
from soak import disk
from soak.launchers import ALL, WORKERS
from soak.schedule import MEAN_GAP_S
from tests.network import hosts

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
INSIDE = "SOAK_IN_OWN_MOUNTS"
EXIT_SKIPPED = 77
"""As automake has it: this machine cannot run it."""


def main() -> int:
    end_on_signals()
    arguments = _arguments()
    if arguments.soak == "story":
        from soak.story import story

        print(story(arguments.site), end="")
        return 0
    if arguments.soak == "kills":
        return _kills(arguments)
    if why := hosts.why_not() or disk.why_not():
        print(f"skipped: {why}")
        return EXIT_SKIPPED
    if INSIDE not in os.environ:
        # The same process, so that a signal reaches it: a program that starts anew finds the mounts its own.
        line = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "soak", *sys.argv[1:]]
        os.execvpe(line[0], line, {**os.environ, INSIDE: "1"})
    del os.environ[INSIDE]
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="holdfast-soak-"))
    if arguments.soak == "chaos":
        from soak.chaos import soak

        launchers = [ALL[name] for name in arguments.launchers.split(",")]
        results = None if arguments.results == "none" else Path(arguments.results)
        script = WORKERS[arguments.worker]
        status = soak(launchers, script, arguments.seed, arguments.minutes, arguments.gap, folder, results)
    else:
        from soak.patience import patience

        status = patience(arguments.minutes, folder / "patience")
    if status == 0 and arguments.folder is None:
        shutil.rmtree(folder)
    elif status:
        print(f"the story is in {folder}")
    return status


def _kills(arguments: argparse.Namespace) -> int:
    """It needs no host of its own: its nodes are agents on loopback."""
    from soak import kills

    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="holdfast-kills-"))
    faults = kills.kills(
        arguments.seed, arguments.minutes, folder, arguments.kinds.split(","), arguments.first, arguments.nodes
    )
    if faults:
        print(f"{faults} jobs with a fault: {folder}")
    elif arguments.folder is None:
        shutil.rmtree(folder)
    return int(faults > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m soak")
    parser.add_argument("--folder", type=Path, help="keep everything here (default: a temporary one, kept on failure)")
    soaks = parser.add_subparsers(dest="soak", required=True)
    chaos = soaks.add_parser("chaos")
    chaos.add_argument("--minutes", type=float, default=20.0)
    chaos.add_argument("--seed", type=int, default=1)
    chaos.add_argument("--gap", type=float, default=MEAN_GAP_S, help="mean seconds between two faults")
    chaos.add_argument("--launchers", default=",".join(ALL), help=f"of {', '.join(ALL)}")
    chaos.add_argument(
        "--worker", default="torch", choices=WORKERS, help="survive: in ht.survive; plain: without torch, holdfast only"
    )
    chaos.add_argument("--results", default=str(RESULTS), help="folder of the result files; none for no file")
    patience = soaks.add_parser("patience")
    patience.add_argument("--minutes", type=float, default=60.0)
    sharded = soaks.add_parser("kills")
    sharded.add_argument("--minutes", type=float, default=60.0)
    sharded.add_argument("--seed", type=int, default=1)
    sharded.add_argument("--kinds", default="fsdp,hsdp,grid")
    sharded.add_argument("--nodes", type=int, default=3, help="at most so many nodes")
    sharded.add_argument("--first", type=int, default=0, help="number of the first job: to repeat one")
    soaks.add_parser("story").add_argument("site", type=Path, help="what the chaos soak of one launcher left")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""A torchrun that calls holdfast run, and hands over what holdfast does not support."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.cli.shim import NAME, unsupported


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train.py", ""),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1 train.py --logs-specs mine", ""),
        ("--logs-specs default train.py", ""),
        ("--logs-specs mine train.py", "--logs-specs mine is a plug-in"),
        ("--event-log-handler mine train.py", "--event-log-handler mine is a plug-in"),
        ("--rdzv-backend c10d --rdzv-conf a=b,store_type=file train.py", "store_type=file"),
        ("--no-such-option train.py", ""),
        ("", ""),
    ],
)
def test_who_takes_a_line(line: str, says: str) -> None:
    why = unsupported(line.split(), {})
    assert says in why
    assert bool(why) == bool(says)


def test_a_variable_counts_as_the_option_does() -> None:
    assert unsupported(["train.py"], {"PET_EVENT_LOG_HANDLER": "mine"})


def shim(folder: Path) -> Path:
    assert main(["shim", str(folder)]) == 0
    return folder / NAME


def test_it_runs_a_job_and_says_who_does(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print('rank', os.environ['RANK'])")
    shim(tmp_path / "bin")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["torchrun", "--nproc-per-node", "2", script], env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "torchrun: holdfast runs this line" in done.stderr
    assert sorted(line.split()[-1] for line in done.stdout.splitlines()) == ["0", "1"]


def test_what_it_hands_over_is_said(tmp_path: Path) -> None:
    """To a torch that only says that it was called."""
    torch = tmp_path / "site" / "torch" / "distributed"
    torch.mkdir(parents=True)
    for folder in (torch, torch.parent):
        (folder / "__init__.py").write_text("")
    (torch / "run.py").write_text("import sys; print(sys.argv[1:])")
    done = subprocess.run(
        [shim(tmp_path), "--logs-specs", "mine", "train.py"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['--logs-specs', 'mine', 'train.py']\n"
    assert done.stderr.startswith("torchrun: torch's own launcher runs this line: --logs-specs mine")


def test_it_takes_no_other_programs_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / NAME).write_text("#!/usr/bin/python\nfrom torch.distributed.run import main\n")
    assert main(["shim", str(tmp_path)]) == 2
    assert "is another program's" in capsys.readouterr().err
    assert "torch.distributed.run" in (tmp_path / NAME).read_text()


def test_run_works_from_a_thread(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained'); raise SystemExit(3)")
    program = (
        "import sys, threading, holdfast.run\n"
        f"thread = threading.Thread(target=lambda: print('exit code', holdfast.run.main([{str(script)!r}]), flush=True))\n"
        "thread.start(); thread.join()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "trained" in done.stdout
    assert "exit code 3" in done.stdout, done.stderr

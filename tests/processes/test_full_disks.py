"""A disk that takes nothing under the run folder: the job ends as it would have ended, and its output is complete.

The disks are small tmpfs mounts, or are mounted read-only. See also tests/supervisor/test_log_spool.py for errors that no
mount gives (a quota).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes.conftest import Agent, Site

LINES = 3000
RANKS = (0, 1)
TROUBLE = "the log files of this run cannot be written"
AGAIN = "the log files of this run are written again"


@dataclass(frozen=True)
class Disk:
    path: Path

    def fill(self) -> None:
        """Take all blocks."""
        with contextlib.suppress(OSError), (self.path / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(b"f" * 4096)

    def free(self) -> None:
        (self.path / "filler").unlink()

    def take_inodes(self) -> None:
        """Take all inodes."""
        with contextlib.suppress(OSError):
            for number in range(10_000):
                (self.path / f"inode{number}").touch()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("needs root: a full disk is a small tmpfs")
    place = tmp_path / "disk"
    place.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=200", "tmpfs", str(place)]
    if subprocess.run(line, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield Disk(place)
    subprocess.run(["umount", "-l", str(place)], check=True)


SCRIPT = """
def lines(word):
    for n in range(LINES): print(f"{word} {RANK} {n} " + "x" * 80)
    sys.stdout.flush()
    subprocess.run(["echo", f"child {word} {RANK}"], check=True)
    os.write(2, f"stderr {word} {RANK}\\n".encode())

LINES = int(sys.argv[1])
lines("before")
meet("before")
while not os.path.exists(sys.argv[2]): time.sleep(0.01)
lines("after")
meet("after")
while not os.path.exists(sys.argv[3]): time.sleep(0.01)
lines("last")
meet("printed")
if sys.argv[4] == "raises" and RANK == 1: raise ValueError("bad row 17")
"""


class Job:
    """Two ranks that print, wait, print, wait, and print, with their run folder on a disk."""

    def __init__(self, site: Site, *options: str | Path, end: str = "well", env: dict[str, str] | None = None) -> None:
        self.site = site
        self.gates = [site.folder / "gate1", site.folder / "gate2"]
        script = site.script(SCRIPT)
        head = ("--standalone", "--nproc-per-node", "2", *options)
        self.agent: Agent = site.start(*head, script, str(LINES), *self.gates, end, env=env)

    def reach(self, word: str) -> None:
        self.site.wait(len(RANKS), word)

    def go_on(self, gate: int) -> None:
        self.gates[gate].touch()

    def end(self) -> int:
        return self.agent.end()

    def is_shown(self) -> None:
        """Every line of every rank was on the console."""
        shown = [line.partition("| ")[2] for line in self.agent.text.splitlines()]
        for word in ("before", "after", "last"):
            for rank in RANKS:
                mine = [line for line in shown if line.startswith(f"{word} {rank} ")]
                assert mine == [f"{word} {rank} {n} " + "x" * 80 for n in range(LINES)]
                assert f"child {word} {rank}" in shown
                assert f"stderr {word} {rank}" in shown


def no_inodes(disk: Disk) -> None:
    disk.fill()
    disk.take_inodes()


LACKS: dict[str, Callable[[Disk], None]] = {"no blocks": Disk.fill, "no inodes": no_inodes}


@pytest.mark.parametrize("end", ["well", "raises"])
@pytest.mark.parametrize("phase", ["from the start", "in the middle", "at the end"])
@pytest.mark.parametrize("lack", LACKS)
def test_a_full_disk_ends_no_job(site: Site, disk: Disk, lack: str, phase: str, end: str) -> None:
    options = ("--log-dir", disk.path) if phase != "from the start" else ("--log-dir", "")
    if phase == "from the start":
        LACKS[lack](disk)
    job = Job(site, *options, end=end, env={"XDG_STATE_HOME": str(disk.path), "TMPDIR": str(site.folder)})
    job.reach("before")
    if phase == "in the middle":
        LACKS[lack](disk)
    job.go_on(0)
    job.reach("after")
    if phase == "at the end":
        LACKS[lack](disk)
    job.go_on(1)
    code, text = job.end(), job.agent.text
    assert code == (1 if end == "raises" else 0), text
    job.is_shown()
    assert text.count(TROUBLE) + text.count("The logs of this run go to") == 1, text[-2000:]
    assert "Traceback (most recent call last)" not in text or end == "raises"
    if end == "raises":
        assert "HF201" in text
        assert "ValueError: bad row 17" in text


def test_a_disk_that_is_full_for_a_while_gets_all_lines(site: Site, disk: Disk) -> None:
    disk.fill()
    job = Job(site, "--log-dir", disk.path)
    job.agent.logs = disk.path
    job.reach("before")
    job.agent.says(TROUBLE)
    job.go_on(0)
    job.reach("after")
    disk.free()
    job.agent.says(AGAIN)
    job.go_on(1)
    assert job.end() == 0
    job.is_shown()
    assert (job.agent.text.count(TROUBLE), job.agent.text.count(AGAIN)) == (1, 1)
    for rank in RANKS:
        lines = (job.agent.folder / "attempt_0" / str(rank) / "stdout.log").read_text().splitlines()
        wanted = [[f"{word} {rank} {n} " + "x" * 80 for n in range(LINES)] for word in ("before", "after", "last")]
        assert [line for line in lines if not line.startswith("child")] == [line for each in wanted for line in each]
    events = [each["event"] for each in job.agent.events()]
    assert events[-1] == "ended", "each line of the journal is whole"


def test_a_restart_on_a_full_disk(site: Site, disk: Disk) -> None:
    body = "meet()\nif ROUND == 0:\n  while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n  sys.exit(1)\nprint('second')"
    gate = site.folder / "gate"
    head = ("--standalone", "--max-restarts", "1", "--log-dir", disk.path)
    agent = site.start(*head, site.script(body), str(gate))
    site.wait(1, "up")
    no_inodes(disk)
    gate.touch()
    assert agent.end() == 0, agent.text
    assert "| second" in agent.text
    assert agent.text.count(TROUBLE) == 1


def test_redirected_output_that_no_disk_takes_is_said_at_the_end(site: Site, disk: Disk) -> None:
    disk.fill()
    agent = site.ends(0, "--standalone", "-r", "3", "--log-dir", disk.path, site.script("print('only in a file')"))
    assert "15 bytes of output are not in the log files: " in agent.text
    assert "No space left on device" in agent.text


def test_a_named_log_folder_that_cannot_be_made_is_an_error_before_the_start(site: Site, disk: Disk) -> None:
    no_inodes(disk)
    agent = site.ends(2, "--standalone", "--log-dir", disk.path, site.script("note('up')"))
    assert "HF110" in agent.text or "cannot be written: No space left on device" in agent.text
    assert len(agent.text.splitlines()) == 1
    assert not site.trail()


def test_a_read_only_default_folder(site: Site, disk: Disk) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk.path)], check=True)
    env = {"XDG_STATE_HOME": str(disk.path), "HOME": str(disk.path), "TMPDIR": str(disk.path)}
    agent = site.ends(0, "--standalone", "--log-dir", "", site.script("print('fine')"), env=env, cwd=disk.path)
    assert "fine" in agent.text
    assert "This run has no log files" in agent.text


def test_a_limit_on_file_sizes_ends_no_worker(site: Site) -> None:
    """`ulimit -f` counts for memory files, too."""
    script = site.script(f"for n in range({LINES}): print(f'{{n}} ' + 'x' * 80)\nsys.stdout.flush()\nnote('end')")
    program = site.program(
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "from holdfast import cli\nsys.exit(cli.main(['run', *sys.argv[1:]]))\n"
    )
    read_end, write_end = os.pipe()
    agent = site.start("--standalone", script, program=program, stdout=write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode()
    assert agent.end() == 0, text
    assert f"{LINES - 1} " + "x" * 80 in text
    assert "the size of files is limited (ulimit -f)" in text
    site.wait(1, "end")


def test_a_console_on_a_full_disk_ends_no_job_and_shows_what_there_is_room_for(site: Site, disk: Disk) -> None:
    disk.fill()
    with (disk.path / "filler").open("rb+") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 8192)
    screen = os.open(disk.path / "screen", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    gate = site.folder / "gate"
    body = "lines = lambda: [print('x' * 80, flush=True) for _ in range(1000)]\nlines()\nmeet()\n"
    body += "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\nprint('room again')"
    agent = site.start("--standalone", site.script(body), str(gate), stdout=screen)
    os.close(screen)
    site.wait(1, "up")
    disk.free()
    gate.touch()
    assert agent.end() == 0
    text = (disk.path / "screen").read_text()
    assert text.endswith("room again\n")
    assert "no reader" not in text

"""A disk that takes nothing under the run folder: the job ends as it would have ended, and its output is complete.

The disks are small tmpfs mounts, are mounted read-only, or break in the middle (tests/support/breaking_disks.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.conftest import LACKS, Agent, JobFolder, SmallDisk, holdfast
from tests.support import breaking_disks
from tests.support.breaking_disks import FAULTS
from tests.support.limits import limit_s

LINES = 3000
RANKS = (0, 1)
TROUBLE = "the log files of this run cannot be written"
AGAIN = "the log files of this run are written again"


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

    def __init__(
        self, job_folder: JobFolder, *options: str | Path, end: str = "well", env: dict[str, str] | None = None
    ) -> None:
        self.job_folder = job_folder
        self.gates = [job_folder.folder / "gate1", job_folder.folder / "gate2"]
        script = job_folder.script(SCRIPT)
        head = ("--standalone", "--nproc-per-node", "2", *options)
        self.agent: Agent = job_folder.start(*head, script, str(LINES), *self.gates, end, env=env)

    def reach(self, word: str) -> None:
        self.job_folder.wait(len(RANKS), word)

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


@pytest.mark.parametrize("end", ["well", "raises"])
@pytest.mark.parametrize("phase", ["from the start", "in the middle", "at the end"])
@pytest.mark.parametrize("lack", LACKS)
def test_a_full_disk_ends_no_job(job_folder: JobFolder, disk: SmallDisk, lack: str, phase: str, end: str) -> None:
    options = ("--log-dir", disk.path) if phase != "from the start" else ("--log-dir", "")
    if phase == "from the start":
        LACKS[lack](disk)
    job = Job(job_folder, *options, end=end, env={"XDG_STATE_HOME": str(disk.path), "TMPDIR": str(job_folder.folder)})
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


def test_a_disk_that_is_full_for_a_while_gets_all_lines(job_folder: JobFolder, disk: SmallDisk) -> None:
    disk.fill()
    job = Job(job_folder, "--log-dir", disk.path)
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


@pytest.mark.parametrize("end", ["well", "raises"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_breaks_in_the_middle_ends_no_job(
    job_folder: JobFolder, tmp_path: Path, fault: str, end: str
) -> None:
    with FAULTS[fault](tmp_path) as disk:
        job = Job(job_folder, "--log-dir", disk.path, end=end)
        job.reach("before")
        disk.fails()
        job.go_on(0)
        job.reach("after")
        job.go_on(1)
        code, text = job.end(), job.agent.text
    assert code == (1 if end == "raises" else 0), text
    job.is_shown()
    assert text.count(TROUBLE) == 1, text[-2000:]
    assert disk.reason in text
    if end == "raises":
        assert "HF201" in text
        assert "ValueError: bad row 17" in text


def test_a_quota_that_is_raised_later_gets_all_lines(job_folder: JobFolder, tmp_path: Path) -> None:
    with breaking_disks.over_quota(tmp_path) as disk:
        job = Job(job_folder, "--log-dir", disk.path)
        job.agent.logs = disk.path
        job.reach("before")
        disk.fails()
        job.go_on(0)
        job.reach("after")
        job.agent.says(TROUBLE)
        disk.recovers()
        job.agent.says(AGAIN)
        job.go_on(1)
        assert job.end() == 0
        job.is_shown()
        for rank in RANKS:
            lines = (job.agent.folder / "attempt_0" / str(rank) / "stdout.log").read_text().splitlines()
            wanted = [f"{word} {rank} {n} " + "x" * 80 for word in ("before", "after", "last") for n in range(LINES)]
            assert [line for line in lines if not line.startswith("child")] == wanted


def test_a_restart_on_a_full_disk(job_folder: JobFolder, disk: SmallDisk) -> None:
    body = "meet()\nif ROUND == 0:\n  while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n  sys.exit(1)\nprint('second')"
    gate = job_folder.folder / "gate"
    head = ("--standalone", "--max-restarts", "1", "--log-dir", disk.path)
    agent = job_folder.start(*head, job_folder.script(body), str(gate))
    job_folder.wait(1, "up")
    disk.fill_and_take_inodes()
    gate.touch()
    assert agent.end() == 0, agent.text
    assert "| second" in agent.text
    assert agent.text.count(TROUBLE) == 1


def test_redirected_output_that_no_disk_takes_is_said_at_the_end(job_folder: JobFolder, disk: SmallDisk) -> None:
    disk.fill()
    agent = job_folder.ends(
        0, "--standalone", "-r", "3", "--log-dir", disk.path, job_folder.script("print('only in a file')")
    )
    assert "15 bytes of output are not in the log files: " in agent.text
    assert "No space left on device" in agent.text


def test_a_named_log_folder_that_cannot_be_made_is_an_error_before_the_start(
    job_folder: JobFolder, disk: SmallDisk
) -> None:
    disk.fill_and_take_inodes()
    agent = job_folder.ends(2, "--standalone", "--log-dir", disk.path, job_folder.script("note('up')"))
    assert "HF108" in agent.text
    assert "cannot be written: No space left on device" in agent.text
    assert len(agent.text.splitlines()) == 1
    assert not job_folder.trail()


def test_a_read_only_default_folder(job_folder: JobFolder, disk: SmallDisk) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk.path)], check=True)
    env = {"XDG_STATE_HOME": str(disk.path), "HOME": str(disk.path), "TMPDIR": str(disk.path)}
    agent = job_folder.ends(
        0, "--standalone", "--log-dir", "", job_folder.script("print('fine')"), env=env, cwd=disk.path
    )
    assert "fine" in agent.text
    assert "This run has no log files" in agent.text


def test_a_limit_on_file_sizes_ends_no_worker(job_folder: JobFolder) -> None:
    """`ulimit -f` counts for memory files, too."""
    script = job_folder.script(f"for n in range({LINES}): print(f'{{n}} ' + 'x' * 80)\nsys.stdout.flush()\nnote('end')")
    program = job_folder.program(
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "from holdfast import cli\nsys.exit(cli.main(['run', *sys.argv[1:]]))\n"
    )
    read_end, write_end = os.pipe()
    agent = job_folder.start("--standalone", script, program=program, stdout=write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode()
    assert agent.end() == 0, text
    assert f"{LINES - 1} " + "x" * 80 in text
    assert "the size of files is limited (ulimit -f)" in text
    job_folder.wait(1, "end")


def test_a_console_on_a_full_disk_ends_no_job_and_shows_what_there_is_room_for(
    job_folder: JobFolder, disk: SmallDisk
) -> None:
    disk.fill()
    with (disk.path / "filler").open("rb+") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 8192)
    screen = os.open(disk.path / "screen", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    gate = job_folder.folder / "gate"
    body = "lines = lambda: [print('x' * 80, flush=True) for _ in range(1000)]\nlines()\nmeet()\n"
    body += "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\nprint('room again')"
    agent = job_folder.start("--standalone", job_folder.script(body), str(gate), stdout=screen)
    os.close(screen)
    job_folder.wait(1, "up")
    disk.free()
    gate.touch()
    assert agent.end() == 0
    text = (disk.path / "screen").read_text()
    assert text.endswith("room again\n")
    assert "no reader" not in text


PLACES = ("/tmp", "/dev/shm", "/tmp /dev/shm")


@pytest.mark.parametrize("options", ["size=4k,nr_inodes=9", "nr_inodes=1", "ro"])
@pytest.mark.parametrize("place", PLACES)
def test_temporary_folders_that_take_nothing_end_no_job(tmp_path: Path, place: str, options: str) -> None:
    """/tmp and /dev/shm, in a mount namespace of the test's own; the job's folder is seen at /mnt there."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    (tmp_path / "train.py").write_text(
        "import os, subprocess, sys\n"
        "print('up', os.environ['RANK'], flush=True)\n"
        "subprocess.run(['echo', 'child'], check=True)\n"
        "if os.environ['RANK'] == '1': raise ValueError('bad row 17')\n"
        "while True: pass\n"
    )
    mount = f'for place in {place}; do mount -t tmpfs -o "$0" tmpfs $place || exit; done'
    fill = f"for place in {place}; do head -c 100k /dev/zero > $place/filler 2>/dev/null; done"
    line = f'mount --bind "$1" /mnt && {{ {mount}; {fill}; }}; cd /mnt && shift && exec "$@"'
    job = [sys.executable, "-m", "holdfast.run", "--standalone", "--nproc-per-node", "2", "/mnt/train.py"]
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", line, options, str(tmp_path), *job]
    environment = {**os.environ, "XDG_STATE_HOME": "/mnt/state", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s(60))
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"this machine mounts nothing: {done.stderr}")
    assert done.returncode == 1, done.stderr
    assert "| up " in done.stdout
    assert "child" in done.stdout
    assert "HF201" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: bad row 17")
    (folder,) = (tmp_path / "state" / "holdfast" / "runs").iterdir()
    assert (folder / "verdict.json").is_file()


def test_the_doctor_sees_that_the_temporary_folder_is_full(
    disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('not this time')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(disk.path))
    disk.fill_and_take_inodes()
    told = holdfast("doctor")
    assert f"HF519 {disk.path} cannot be written: No space left on device" in told.stdout

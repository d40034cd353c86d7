"""What workers write: on the console and in files, complete, whoever reads or does not."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.limits import limit_s, until

LINES = "for n in range(20000): print(f'{RANK} {n} ' + 'x' * 80)\n"


def written(agent, rank: int) -> list[str]:
    return (agent.folder / "attempt_0" / str(rank) / "stdout.log").read_text().splitlines()


def test_every_line_on_the_console_and_in_the_files(site) -> None:
    script = site.script(LINES)
    done, agent = site.run("--standalone", "--nproc-per-node", "2", "--tee", "3", script)
    assert done == 0
    shown = agent.text.splitlines()
    for rank in range(2):
        wanted = [f"{rank} {n} " + "x" * 80 for n in range(20000)]
        assert written(agent, rank) == wanted
        assert [line.partition(":")[2] for line in shown if line.startswith(f"[default{rank}]:")] == wanted
    assert len(shown) == 40000


def test_a_pipe_that_nobody_reads_holds_up_nobody(site) -> None:
    """The workers end and their files are complete while the console is blocked; then somebody reads, and gets it all."""
    script = site.script(LINES + "sys.stdout.flush()\nnote('end')")
    read_end, write_end = os.pipe()
    agent = site.start("--standalone", "--nproc-per-node", "2", script, stdout=write_end)
    os.close(write_end)
    site.wait(2, "end")
    assert [len(written(agent, rank)) for rank in range(2)] == [20000, 20000]
    with os.fdopen(read_end, "rb") as pipe:
        assert len(pipe.read().splitlines()) == 40000
    assert agent.end() == 0


def test_an_interrupt_while_the_console_is_blocked_at_the_end(site) -> None:
    script = site.script(LINES + "sys.stdout.flush()\nnote('end')")
    read_end, write_end = os.pipe()
    agent = site.start("--standalone", script, stdout=write_end)
    os.close(write_end)
    site.wait(1, "end")
    until(lambda: agent.events("ended"), "the end of the job")
    time.sleep(0.2)
    agent.signal(signal.SIGINT)
    assert agent.end() == 130, "it waited until nobody read, and not until it was interrupted"
    os.close(read_end)


def test_a_blocked_console_does_not_hold_up_a_restart(site) -> None:
    script = site.script(
        LINES + "sys.stdout.flush()\nmeet()\nif ROUND == 0:\n  if RANK == 1: sys.exit(1)\n  hold()\nnote('end')"
    )
    read_end, write_end = os.pipe()
    agent = site.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script, stdout=write_end)
    os.close(write_end)
    site.wait(2, "end")
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode()
    assert agent.end() == 0
    assert sum("x" * 80 in line for line in text.splitlines()) == 80000


def test_a_reader_that_goes_away(site) -> None:
    """`holdfast run … | head -1`: the job goes on, its files are complete, its exit code is its own."""
    script = site.script("print('first', flush=True)\nmeet()\n" + LINES + "sys.exit(3)")
    read_end, write_end = os.pipe()
    agent = site.start("--standalone", script, stdout=write_end)
    os.close(write_end)
    os.read(read_end, 1)
    os.close(read_end)
    assert agent.end() == 3
    assert len(written(agent, 0)) == 20001


def test_all_that_a_killed_worker_wrote_is_in_its_file(site) -> None:
    script = site.script("os.write(1, b'y' * 100_000 + b'\\nlast words')\nos.kill(os.getpid(), signal.SIGKILL)")
    done, agent = site.run("--standalone", script)
    assert done == 137
    assert (agent.folder / "attempt_0" / "0" / "stdout.log").read_bytes() == b"y" * 100_000 + b"\nlast words"
    assert "last words" in agent.text


def test_all_is_in_the_file_when_the_agent_is_killed(site) -> None:
    script = site.script("os.write(1, b'written\\n')\nmeet()\nhold()")
    agent = site.start("--standalone", "--nproc-per-node", "2", script)
    site.wait(2, "up")
    agent.signal(signal.SIGKILL)
    agent.end()
    assert [written(agent, rank) for rank in range(2)] == [["written"]] * 2
    site.all_gone()


def test_on_a_terminal_workers_see_one(site) -> None:
    script = site.script("note('tty', out=os.isatty(1), err=os.isatty(2))\nprint('line')\nprint('bar', end='\\r')")
    ours, theirs = pty.openpty()
    agent = site.start("--standalone", "--no-dedup", "--nproc-per-node", "2", script, stdout=theirs)
    os.close(theirs)
    seen = b""
    end = time.monotonic() + limit_s(20)
    while time.monotonic() < end:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the last who had the other end is gone
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    assert agent.end() == 0
    assert [(each["out"], each["err"]) for each in site.trail("tty")] == [(True, True)] * 2
    assert seen.count(b"line") == 2, seen
    assert b"line" in (agent.folder / "attempt_0" / "0" / "stdout.log").read_bytes()


def test_off_a_terminal_they_see_none(site) -> None:
    assert site.run("--standalone", site.script("note('tty', out=os.isatty(1), err=os.isatty(2))"))[0] == 0
    assert [(each["out"], each["err"]) for each in site.trail("tty")] == [(False, False)]


@pytest.fixture
def small_disk(tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("needs root: a full disk is a small tmpfs")
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here: the full disk is not tested")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_for_logs(site, small_disk: Path) -> None:
    """The workers meet ENOSPC in their own print, as with any file; the launcher neither hangs nor hides the exit code."""
    script = site.script(
        "try:\n  for n in range(20000): os.write(1, b'z' * 80 + b'\\n')\nexcept OSError as error: note('full', errno=error.errno)\n"
        "sys.exit(3)"
    )
    done, agent = site.run("--log-dir", small_disk, "--standalone", "--nproc-per-node", "2", script)
    assert done == 3, agent.text
    assert {each["errno"] for each in site.trail("full")} == {28}
    assert "exit code    3" in agent.text
    assert "Traceback" not in agent.text


def test_a_disk_full_before_the_start(site, small_disk: Path) -> None:
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"f" * 1000)
    done, agent = site.run("--log-dir", small_disk, "--standalone", site.script("note('up')\nsys.exit(3)"))
    assert done in (2, 3), agent.text
    assert "Traceback" not in agent.text

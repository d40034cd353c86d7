"""The last screen: at most fifteen lines and the user's own traceback, which comes last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def screen(agent) -> tuple[list[str], list[str]]:
    """What holdfast says at the end, and what follows: the traceback or the tail of stderr."""
    lines = agent.text[agent.text.rindex("holdfast: HF") :].splitlines()
    words = next(number for number, line in enumerate(lines, start=1) if line.startswith("  exit code "))
    return lines[:words], lines[words:]


def check(agent) -> list[str]:
    ours, users = screen(agent)
    assert len(ours) <= 15, agent.text
    assert "holdfast" not in "".join(users).replace(str(agent.logs), ""), "the user's own lines only"
    return users


@pytest.mark.parametrize(
    ("body", "last", "code"),
    [
        ("raise ValueError('the loss is nan')", "ValueError: the loss is nan", 1),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'", 1),
        ("sys.exit('text of an exit')", "text of an exit", 1),
        ("os.write(2, b'before the end\\n')\nos._exit(7)", "before the end", 7),
        ("raise KeyError('ключ')", "KeyError: 'ключ'", 1),
        ("class Odd(Exception):\n  def __str__(self): raise TypeError\nraise Odd", "", 1),
        ("raise ExceptionGroup('several', [ValueError(1), KeyError(2)])", "", 1),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded", 1),
    ],
)
def test_endings(site, body: str, last: str, code: int) -> None:
    done, agent = site.run("--standalone", "--nproc-per-node", "2", site.script(f"if RANK == 1: hold()\n{body}"))
    assert done == code, agent.text
    users = check(agent)
    assert not last or users[-1].startswith(last), agent.text
    assert last.split("'", maxsplit=1)[0] in str(agent.verdict)


def test_syntax_error(site) -> None:
    script = site.folder / "broken.py"
    script.write_text("a = 1\nif a = 2:\n    pass\n")
    done, agent = site.run("--standalone", script)
    assert done == 1
    users = check(agent)
    assert users[-1].startswith("SyntaxError: "), agent.text
    assert any("if a = 2:" in line for line in users)


def test_error_in_a_spawned_child(site) -> None:
    script = site.script(
        """
import multiprocessing
def work():
    raise LookupError("in the child")
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    sys.exit(process.exitcode + 10)
"""
    )
    done, agent = site.run("--standalone", script)
    assert done == 11
    assert "LookupError: in the child" in agent.text
    check(agent)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe" * 1000, b'{"message": {"message": [], "extraInfo": 4}}'])
def test_corrupt_error_file(site, content: bytes) -> None:
    script = site.script(f"open(os.environ['TORCHELASTIC_ERROR_FILE'], 'wb').write({content!r})\nos._exit(4)")
    done, agent = site.run("--standalone", script)
    assert done == 4, agent.text
    check(agent)


def test_a_script_that_changes_its_folder(site) -> None:
    """Every path given to it is absolute."""
    script = site.script("os.mkdir('elsewhere')\nos.chdir('elsewhere')\nraise ValueError('from afar')")
    done, agent = site.run("--standalone", "--log-dir", "relative", "train.py")
    assert script.exists()
    assert done == 1
    assert agent.text.rstrip().endswith("ValueError: from afar")
    assert list((site.folder / "relative").glob("*/attempt_0/0/error.json"))
    assert not any((site.folder / "elsewhere").iterdir())


def test_an_unwritable_folder(site, tmp_path: Path) -> None:
    """Nothing is written where the user stands."""
    place = tmp_path / "readonly"
    place.mkdir()
    place.chmod(0o500)
    script = site.script("raise ValueError('all the same')")
    agent = site.start("--standalone", script, cwd=place)
    assert agent.end() == 1
    assert agent.text.rstrip().endswith("ValueError: all the same")
    assert list(place.iterdir()) == []


def test_a_log_dir_that_cannot_be_written(site) -> None:
    (site.folder / "file").write_text("")
    done, agent = site.run("--log-dir", site.folder / "file" / "below", "--standalone", site.script("note('up')"))
    assert done == 2
    assert "HF108" in agent.text
    assert len(agent.text.splitlines()) <= 2
    assert site.trail() == []


def test_many_failures_at_once_are_one_screen(site) -> None:
    script = site.script("meet()\nraise RuntimeError(f'rank {RANK}')")
    done, agent = site.run("--standalone", "--nproc-per-node", "8", script)
    assert done == 1
    check(agent)
    assert agent.text.count("Traceback") <= 9


def test_a_long_message_with_newlines_is_one_line_of_ours(site) -> None:
    script = site.script("raise RuntimeError('first line\\n' + 'more\\n' * 500 + 'x' * 100_000)")
    done, agent = site.run("--standalone", script)
    assert done == 1
    ours, _ = screen(agent)
    assert len(ours) <= 15
    assert max(map(len, ours)) < 400


def test_our_own_error_file_is_filled(site, tmp_path: Path) -> None:
    """An outer launcher reads the first failure from where it said, as with torchrun."""
    own = tmp_path / "outer.json"
    agent = site.start(
        "--standalone", site.script("raise ValueError('inner')"), env={"TORCHELASTIC_ERROR_FILE": str(own)}
    )
    assert agent.end() == 1
    assert "ValueError: inner" in own.read_text()
    assert os.path.getsize(own) > 100


def test_the_failing_ranks_traceback_is_shown_once_and_its_victims_are_one_line(site) -> None:
    script = site.script(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the victims complain, however fast they are asked to stop
meet()
print("loading the data", flush=True)
if RANK == 1:
    raise ValueError("bad shape")
(culprit,) = [each["pid"] for each in notes("up") if each["rank"] == 1]
while os.path.exists(f"/proc/{culprit}/exe"):  # a zombie has none
    time.sleep(0.01)
raise RuntimeError(f"[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.8]:4036{RANK}")
"""
    )
    done, agent = site.run("--standalone", "--nproc-per-node", "4", script)
    assert done == 1
    assert agent.text.count("Traceback (most recent call last)") == 1
    assert agent.text.rstrip().endswith("ValueError: bad shape")
    assert "loading the data (×4)" in agent.text
    (victims,) = (line for line in agent.text.splitlines() if line.startswith("  because of it"))
    assert victims.endswith("; in their logs")
    assert "log          holdfast logs " in agent.text


def test_no_dedup_shows_all(site) -> None:
    script = site.script("meet()\nprint('loading', flush=True)\nif RANK == 1: raise ValueError('bad shape')\nhold()")
    done, agent = site.run("--standalone", "--no-dedup", "--nproc-per-node", "4", script)
    assert done == 1
    assert agent.text.count("| loading\n") == 4
    assert agent.text.count("Traceback (most recent call last)") == 2

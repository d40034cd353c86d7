"""Frames of the main thread from texts as faulthandler really wrote them."""

from __future__ import annotations

import pytest

from holdfast.protocol.rank_progress import (
    FRAMES_MAX,
    THREADS_MAX,
    Frame,
    is_library,
    main_thread,
    program_frame,
    program_threads,
)

TWO_THREADS = """\
Thread 0x00007f41168b56c0 (most recent call first):
  File "/tmp/p.py", line 4 in idle
  File "/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py", line 982 in run
  File "/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f4117435b80 (most recent call first):
  File "/tmp/p.py", line 9 in deep
  File "/tmp/p.py", line 10 in <module>
  File "/opt/holdfast/worker/bootstrap.py", line 153 in run
  File "/opt/holdfast/worker/bootstrap.py", line 331 in main
  File "/opt/holdfast/worker/bootstrap.py", line 347 in <module>
"""
ANOTHER_HANDLES = TWO_THREADS.replace("Current t", "T").replace("Thread", "Current thread", 1)
NAMED = TWO_THREADS.replace("0x00007f4117435b80 (", "0x00007f4117435b80 [python] (")  # 3.13
DEEP = "Current thread 0x01 (most recent call first):\n" + '  File "/p.py", line 8 in deep\n' * 100 + "  ...\n"
ODD = """\
Current thread 0x01 (most recent call first):
  File "/odd "name", line 3 in x.py", line 12 in <lambda>
  File ???, line ??? in ???
  File "/t\\xe9.py", line 1 in <module>
"""


def many_threads() -> str:
    """More than 100: the main thread, which would be the last, is left out unless it is the current one."""
    others = 'Thread 0x02 (most recent call first):\n  File "/p.py", line 1 in idle\n\n'
    current = 'Current thread 0x01 (most recent call first):\n  File "/p.py", line 2 in main\n\n'
    return others * 50 + current + others * 49 + "...\n"


@pytest.mark.parametrize("text", [TWO_THREADS, ANOTHER_HANDLES, NAMED], ids=["current", "another", "3.13"])
def test_the_main_thread_is_the_last(text: str) -> None:
    assert main_thread(text) == (Frame("/tmp/p.py", 9, "deep"), Frame("/tmp/p.py", 10, "<module>"))


def test_other_threads_of_the_program() -> None:
    idle = "".join(
        f'Thread 0x{number} (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 9 in run\n'
        for number in range(9)
    )
    ((first, *rest),) = program_threads(idle + TWO_THREADS)
    assert first == Frame("/tmp/p.py", 4, "idle")
    assert len(rest) == 2
    many = program_threads(many_threads())
    assert many == ((Frame("/p.py", 1, "idle"),),) * THREADS_MAX
    assert program_threads("") == ()


def test_frames_that_were_cut() -> None:
    assert main_thread(DEEP) == (Frame("/p.py", 8, "deep"),) * FRAMES_MAX


def test_threads_that_were_cut() -> None:
    assert main_thread(many_threads()) == (Frame("/p.py", 2, "main"),)


def test_odd_names() -> None:
    first, second, third = main_thread(ODD)
    assert first == Frame('/odd "name", line 3 in x.py', 12, "<lambda>")
    assert second == Frame("???", 0, "???")
    assert third.line == 1


@pytest.mark.parametrize(
    "text", ["", "\0\0", "Current thread", "Current thread 0x1 (most recent call first):\n", "x" * 5000]
)
def test_what_is_no_dump(text: str) -> None:
    assert main_thread(text) == ()


def test_every_beginning_of_a_dump_can_be_read() -> None:
    lines = TWO_THREADS.count("\n")
    for end in range(len(TWO_THREADS)):
        assert len(main_thread(TWO_THREADS[:end])) < lines


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/srv/train.py", False),
        ("/srv/torch_project/model.py", False),
        ("<string>", False),
        ("<frozen runpy>", True),
        ("/usr/lib/python3.11/threading.py", True),
        ("/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py", True),
        ("/usr/lib/python3/dist-packages/numpy/core.py", True),
        ("/src/pytorch/torch/_tensor.py", True),
        ("/src/pytorch/torch/nn/modules/linear.py", True),
        ("/data/torch/train.py", False),
        ("/opt/conda/envs/torch/lib/python3.11/threading.py", True),
        ("/opt/holdfast/train/group.py", True),
    ],
)
def test_what_is_the_programs_own(file: str, library: bool) -> None:
    assert is_library(file) is library


def test_a_program_that_is_an_installed_package() -> None:
    torch = Frame("/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 1, "barrier")
    package = Frame("/lib/python3.11/site-packages/llm/train.py", 7, "main")
    runpy = Frame("<frozen runpy>", 88, "_run_code")
    assert program_frame((torch, package, runpy)) == 1
    assert program_frame((torch, runpy)) is None
    assert program_frame((torch, package, Frame("/srv/run.py", 1, "<module>"))) == 2
    conda = Frame("/opt/conda/envs/torch/lib/python3.11/site-packages/llm/train.py", 7, "main")
    assert program_frame((torch, conda, runpy)) == 1


def test_of_one_thread_alone() -> None:
    text = 'Stack (most recent call first):\n  File "/job/t.py", line 3 in f\n  File "/job/t.py", line 9 in <module>\n'
    assert [frame.line for frame in main_thread(text)] == [3, 9]

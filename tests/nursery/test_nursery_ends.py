"""A forked worker ends as one that was executed does, in each way in which a program can end."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
ENDS = 5
"""Children of ends.py; it ends itself, too."""


def ends(run_cli: Any, preload: str, *modules: str) -> str:
    """What all of them print."""
    done = run_cli(["--standalone", "--preload", preload, "ends.py", *modules], cwd=SCRIPTS)
    assert done.code == 0, done
    assert done.err.count("ValueError: boom") == 2, done.err
    assert "\nKeyboardInterrupt\n" in done.err.replace("0| ", "\n"), done.err
    return str(done.out + done.err)


@pytest.mark.parametrize("preload", ["none", "cycle"])
def test_what_was_imported_ahead_is_collected_at_the_end(run_cli: Any, preload: str) -> None:
    assert ends(run_cli, preload, "cycle").count("collected") == ENDS + 1


def nanobind_watches() -> bool:
    """Whether torch brings a library that looks for objects which nobody has freed when the interpreter ends."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return False
    library = Path(found.origin).parent / "_C" / "libtriton.so"
    return library.exists() and b"nanobind: leaked" in library.read_bytes()


@pytest.mark.xdist_group("torch jobs")
@pytest.mark.parametrize("preload", ["none", "torch,torch._dynamo"])
def test_no_library_of_torchs_complains_at_the_end(run_cli: Any, preload: str) -> None:
    pytest.importorskip("torch")
    if not nanobind_watches():
        pytest.skip("this torch has no triton that is built with nanobind")
    assert "nanobind" not in ends(run_cli, preload, "torch", "torch._dynamo")

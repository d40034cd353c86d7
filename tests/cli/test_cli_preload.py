"""--preload auto: what it reads in a script, and when it says no."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path

import pytest

from holdfast.cli.devices import Probes
from holdfast.cli.grammar import parse
from holdfast.cli.option_table import OPTIONS
from holdfast.cli.program import decide
from holdfast.cli.resolve import is_installed, resolve
from holdfast.protocol.errors import UsageError
from holdfast.protocol.options import CommandKind, Preload, WorkerCommand
from holdfast.supervisor.worker_command import script_hash

REDUCES = ("numpy", "torch")
TRAINS = ("numpy", "torch", "torch._dynamo")
OURS = (*TRAINS, "holdfast.train.snapshots_api", "holdfast.train.data.loader", "holdfast.train.survival")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(source: str, *, restarts: bool = False, **beside: str) -> Preload:
    Path("train.py").write_text(textwrap.dedent(source))
    for name, text in beside.items():
        Path(f"{name}.py").write_text(textwrap.dedent(text))
    return decide(WorkerCommand(kind=CommandKind.SCRIPT, target="train.py"), restarts=restarts)


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import torch", REDUCES),
        ("import torch.distributed as dist\ndist.init_process_group()", REDUCES),
        ("from torch.nn.parallel import DistributedDataParallel as Wrapped", TRAINS),
        ("import torch\nmodel = torch.nn.parallel.DistributedDataParallel(net)", TRAINS),
        ("import torch\ntorch.optim.SGD([], 1)", TRAINS),
        ("import torch.optim as o", TRAINS),
        ("import torch\ntorch.compile(f)", TRAINS),
        ("import torch, re\nre.compile('a')", REDUCES),
        ("def main():\n    import lightning", TRAINS),
        ("import accelerate", TRAINS),
        ("from transformers import Trainer", TRAINS),
        ("import torchvision", REDUCES),
        ("import torch\nimport holdfast.train as ht", OURS),
        ("import torch\nfrom torch.optim import SGD\nfrom holdfast.train import Snapshots", OURS),
        ("import torch\nfrom holdfast import train", OURS),
        ("import holdfast.train", OURS),
        ("import holdfast.training_of_others", ()),
        ("import torch\nfrom holdfast.worker import should_stop", REDUCES),
        ("print('import torch')", ()),
        ("import os\nos.environ['A'] = '1'", ()),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", ()),
        ("if True:\n    try:\n        import torch\n    except ImportError:\n        pass", REDUCES),
    ],
)
def test_what_is_imported_follows_from_what_is_used(source: str, modules: tuple[str, ...]) -> None:
    assert read(source).modules == modules


@pytest.mark.parametrize(
    "setting",
    [
        "os.environ['OMP_NUM_THREADS'] = '4'",
        "os.environ['A'], other = '1', 2",
        "os.environ.setdefault('OMP_NUM_THREADS', '4')",
        "os.environ.update(A='1')",
        "os.environ |= {'A': '1'}",
        "del os.environ['A']",
        "os.environ.pop('A', None)",
        "os.environ = {}",
        "os.putenv('A', '1')",
        "os.environb[b'A'] = b'1'",
        "from os import environ as e, environ\nenviron['A'] = '1'",
        "if not os.environ.get('A'):\n    os.environ['A'] = '1'",
        "with open('x') as f:\n    os.environ['A'] = f.read()",
        "class Setup:\n    os.environ['A'] = '1'",
        "def setup():\n    os.environ['A'] = '1'\nsetup()",
        "from dotenv import load_dotenv\nload_dotenv()",
        "os.sched_setaffinity(0, {0})",
    ],
)
def test_a_variable_set_before_torch_means_exec(setting: str) -> None:
    said = read(f"import os\n{setting}\nimport torch")
    assert said.modules == ()
    assert "before torch is imported" in said.why
    assert "train.py line" in said.why
    assert read(f"import os\nimport torch\n{setting}").modules == REDUCES


def test_a_function_that_is_not_called_before_torch_does_not_count() -> None:
    assert read("import os\ndef setup():\n    os.environ['A'] = '1'\nimport torch\nsetup()").modules == REDUCES


def test_torch_in_a_function_and_a_variable_anywhere_means_exec() -> None:
    source = "import os\ndef main():\n    import torch\ndef setup():\n    os.environ['A'] = '1'\nsetup()\nmain()"
    assert read(source).modules == ()
    assert read("def main():\n    import torch\nmain()").modules == REDUCES


@pytest.mark.parametrize(
    "source",
    [
        "total = " + " + ".join(["1"] * 900),
        "if x == 0: y = 0\n" + "".join(f"elif x == {n}: y = {n}\n" for n in range(900)),
    ],
    ids=["sum", "elif"],
)
def test_what_is_nested_too_deeply_is_executed(source: str) -> None:
    said = read(f"import torch\nx = 0\n{source}")
    assert said.modules == REDUCES or "nested too deeply" in said.why
    assert "nested too deeply" in read(f"x = 0\n{source}\nimport torch").why


def test_modules_beside_the_script_are_read_in_its_place() -> None:
    assert read("import mine", mine="import torch").modules == REDUCES
    assert read("import config\nimport torch", config="import os\nos.environ['A'] = '1'").modules == ()
    assert read("import torch\nimport config", config="import os\nos.environ['A'] = '1'").modules == REDUCES
    assert read("import a", a="import b", b="import a, torch").modules == REDUCES


def test_the_rest_is_imported_for_restarts_only_if_there_can_be_one() -> None:
    assert read("import torch").later == ()
    assert read("import torch", restarts=True).later == ("torch._dynamo",)
    assert read("import torch.optim", restarts=True).later == ()


@pytest.mark.parametrize("source", ["import torch\nif", "\0", "import torch #" + "x" * 400_000, "(" * 5000])
def test_what_is_no_python_or_too_long_is_executed(source: str) -> None:
    assert read(source).modules == ()


def test_nothing_is_said_about_odd_escapes(capfd: pytest.CaptureFixture[str]) -> None:
    assert read(r"import torch; a = '\d'").modules == REDUCES
    assert capfd.readouterr().err == ""


def test_modules_packages_folders_and_unknown_targets(folder: Path) -> None:
    package = folder / "package" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("import os\nos.environ['A'] = '1'\n")
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import torch")
    (package / "train.py").write_text("import torch.optim")
    Path("plain.py").write_text("import torch")
    Path("local0.py").write_text("import torch")

    def of(kind: CommandKind, target: str) -> Preload:
        return decide(WorkerCommand(kind=kind, target=target), restarts=False)

    assert of(CommandKind.MODULE, "plain").modules == REDUCES
    assert of(CommandKind.SCRIPT, "package/inner").modules == REDUCES
    assert "__init__.py line 2 sets A" in of(CommandKind.MODULE, "package.inner").why
    (package.parent / "__init__.py").write_text("")
    assert of(CommandKind.MODULE, "package.inner").modules == REDUCES
    assert of(CommandKind.MODULE, "package.inner.train").modules == TRAINS
    assert "is not known in advance" in of(CommandKind.SCRIPT, "local$local_rank.py").why
    assert of(CommandKind.MODULE, "no.such.module").modules == ()


def options(*line: str, missing: Collection[str] = (), **environ: str) -> Preload:
    Path("train.py").write_text("import torch")
    probes = Probes(nvml=list, cpus=6, installed=lambda module: module not in missing)
    return resolve(parse(line, environ, OPTIONS), environ, probes).options.preload


def test_the_option_and_its_variable() -> None:
    assert options("--preload", "auto", "train.py").modules == REDUCES
    assert options("--preload", "none", "train.py").modules == ()
    assert options("--preload", "torch, pandas.core", "train.py").modules == ("torch", "pandas.core")
    assert options("train.py", HOLDFAST_PRELOAD="numpy").modules == ("numpy",)
    assert options("train.py", PET_PRELOAD="numpy").modules == ("numpy",)
    assert options("train.py", PET_PRELOAD="numpy", HOLDFAST_PRELOAD="none").modules == ()
    assert options("--no-python", "--preload", "torch", "/bin/true").modules == ()
    for wrong in ("", "torch,", "a b", "1", "-c"):
        with pytest.raises(UsageError, match="--preload"):
            options(f"--preload={wrong}", "train.py")


def test_what_is_not_installed_is_not_tried() -> None:
    assert options("train.py", missing=["numpy"]).modules == ("torch",)
    assert options("train.py", missing=["numpy"]).why == options("train.py").why
    without = options("train.py", missing=["torch"])
    assert (without.modules, without.why, without.torch) == ((), "torch is not installed", "torch")
    elsewhere = options("train.py", missing=["torch"], PYTHON_EXEC="/usr/bin/env")
    assert elsewhere.modules == REDUCES, "another Python may have it"
    assert options("--preload", "torch", "train.py", missing=["torch"]).modules == ("torch",), "the reason is then told"
    assert is_installed("json")
    assert is_installed("sys")
    assert not is_installed("no_such_module")


def test_bound_workers_are_forked_only_if_their_threads_are_counted() -> None:
    assert options("--preload", "auto", "--numa-binding", "node", "train.py").modules == ()
    assert (
        options("--preload", "auto", "--numa-binding", "node", "--nproc-per-node", "2", "train.py").modules == REDUCES
    )


# --- whether a store will be wanted ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("import torch.nn.functional as F", "torch"),
        ("from torch import nn", "torch"),
        ("def main():\n    from accelerate import Accelerator", "accelerate"),
        ("import json, lightning as L", "lightning"),
        ("import os\nos.environ['A'] = '1'\nimport torch", "torch"),
        ("import beside", "torch"),
        ("from beside import *", "torch"),
        ("from . import beside", "torch"),
        ("import twice", "torch"),
        ("import package", "transformers"),
        ("import numpy", ""),
        ("import torchless", ""),
        ("# import torch", ""),
        ("x = 'import torch'", ""),
        ("import torch(", ""),
        ("\0", ""),
    ],
)
def test_which_package_brings_torch(source: str, package: str) -> None:
    Path("package").mkdir()
    Path("package/__init__.py").write_text("from transformers import Trainer")
    assert read(source, beside="import torch", twice="import beside").torch == package


@pytest.mark.parametrize("wish", ["auto", "none", "json"])
def test_it_is_known_whatever_is_preloaded(wish: str) -> None:
    Path("train.py").write_text("import torch")

    def brings(*line: str) -> str:
        return resolve(parse(["--preload", wish, *line], {}, OPTIONS), {}, Probes(cpus=1)).options.preload.torch

    assert brings("train.py") == "torch"
    Path("train.py").write_text("#!/usr/bin/env python3\nimport torch")
    Path("train.py").chmod(0o755)
    assert not brings("--no-python", "./train.py")


def test_a_script_from_a_pipe_is_left_to_the_worker(tmp_path: Path) -> None:
    """What the launcher read would be lost."""
    path = tmp_path / "train.py"
    os.mkfifo(path)
    command = WorkerCommand(kind=CommandKind.SCRIPT, target=str(path))
    assert decide(command, restarts=True).why == "train.py is not a regular file"
    assert script_hash(command) == ""


def test_a_module_in_a_folder_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    command = WorkerCommand(kind=CommandKind.MODULE, target="json.tool", python=sys.executable)
    assert decide(command, restarts=True).why == "tool.py imports nothing that is built on torch"

"""What a worker's program imports, as far as its source tells without being run.

Knows files and the names of packages that are built on torch; light, and used before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from holdfast.core.options import CommandKind, WorkerCommand

SOURCE_BYTES_MAX = 2_000_000
"""A script above this is not looked into."""

TORCH_USERS = frozenset(
    [
        "torch",
        "accelerate",
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "transformers",
        "deepspeed",
        "fairscale",
        "composer",
        "trl",
        "peft",
        "ignite",
        "catalyst",
        "fastai",
        "torchvision",
        "torchaudio",
        "torchtext",
        "megatron",
        "colossalai",
        "horovod",
        "nemo",
        "torchtune",
    ]
)
"""torch and what is built on it: whoever imports one of them most likely opens a process group."""


def wants_store(command: WorkerCommand) -> bool:
    """Whether the program's source imports torch or something built on it, itself or through a module beside it.

    A guess that costs nothing when it is wrong: then the server starts when the first client connects.
    """
    source = source_of(command)
    if source is None:
        return False
    names = imported(source)
    beside = [path for name in sorted(names) if (path := module_beside(source, name)) is not None]
    return bool(TORCH_USERS & names.union(*(imported(path) for path in beside)))


def source_of(command: WorkerCommand) -> Path | None:
    if command.kind is CommandKind.PROGRAM:
        return None
    if command.kind is not CommandKind.MODULE:
        path = Path(command.target)
        return path / "__main__.py" if path.is_dir() else path
    place = Path(*command.target.split("."))
    candidates = (place.with_suffix(".py"), place / "__main__.py")
    return next((path for path in candidates if path.is_file()), None)


def module_beside(source: Path, name: str) -> Path | None:
    candidates = (source.parent / f"{name}.py", source.parent / name / "__init__.py")
    return next((path for path in candidates if path != source and path.is_file()), None)


_IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import\b[ \t]*\(?([^#\n]*)|import[ \t]+([^#\n;]+))", re.MULTILINE
)


def imported(path: Path) -> set[str]:
    """Top-level names of what a source file seems to import, anywhere in it; nothing for what cannot be read.

    Lines are enough for a guess; a syntax tree would cost every start ten milliseconds.
    """
    names: set[str] = set()
    with contextlib.suppress(OSError):
        if not path.is_file() or path.stat().st_size > SOURCE_BYTES_MAX:
            return names
        for origin, members, modules in _IMPORT.findall(path.read_bytes()):
            listed = members if origin == b"." else origin or modules
            for item in listed.split(b","):
                name = item.strip().partition(b" ")[0].lstrip(b".").partition(b".")[0]
                names.add(name.decode("ascii", "ignore"))
    names.discard("")
    return names

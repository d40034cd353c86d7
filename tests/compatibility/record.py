"""Record what this version writes, for later versions to read.

    python -m tests.compatibility.record

Writes tests/compatibility/recorded/VERSION: wire.json (each message in bytes), run/ (the folder of a run that was restarted and
failed), snapshots/ (two ranks, two steps). Run it once per released version; recorded files are never changed afterwards.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from holdfast.protocol import charter, codec, session
from holdfast.protocol import messages as protocol
from holdfast.version import __version__
from tests.train.snapshots import saves

RECORDED = Path(__file__).parent / "recorded"
HANDSHAKE = (session.Hello, session.Challenge, session.Proof, session.Accepted)
SNAPSHOT_ITEMS = 100
SCRIPT = """
import os, sys
print("rank", os.environ["RANK"])
if os.environ["RANK"] == "1":
    raise ValueError("the loss is nan")
"""


def messages() -> list[Any]:
    """One of each kind, with every field set."""
    both = (charter.Poll, charter.Polled, charter.Renew, charter.Renewed)
    kinds = [*protocol.AgentMessage.__subclasses__(), *protocol.CoordinatorMessage.__subclasses__(), *both]
    return [example(msgspec.inspect.type_info(kind)) for kind in kinds]


def example(kind: msgspec.inspect.Type) -> Any:
    """A value of this type, as one of its field's usual values or the first that its type allows."""
    match kind:
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: example(field.type) for field in fields})
        case msgspec.inspect.UnionType(types=types):
            return example(types[0])
        case msgspec.inspect.VarTupleType(item_type=item):
            return (example(item),)
        case msgspec.inspect.TupleType(item_types=items):
            return tuple(map(example, items))
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return {example(key): example(value)}
        case msgspec.inspect.EnumType(cls=cls):
            return list(cls)[-1]
        case msgspec.inspect.Metadata(type=inner):
            return example(inner)
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.IntType():
            return 1
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.BytesType():
            return b"0123456789abcdef"
        case msgspec.inspect.NamedTupleType(cls, fields):
            return cls(*(example(field.type) for field in fields))
        case msgspec.inspect.NoneType():
            return None
        case _:
            raise TypeError(f"no example of {kind}")


def record_wire(folder: Path) -> None:
    rows = [
        {"message": type(message).__name__, "bytes": codec.encode(message).hex(), "value": plain(message)}
        for message in messages()
    ]
    rows += [
        {
            "handshake": kind.__name__,
            "bytes": msgspec.msgpack.encode(example(msgspec.inspect.type_info(kind))).hex(),
            "value": plain(example(msgspec.inspect.type_info(kind))),
        }
        for kind in HANDSHAKE
    ]
    (folder / "wire.json").write_text("\n".join(["[", ",\n".join(map(json.dumps, rows)), "]\n"]))


def plain(message: Any) -> Any:
    """Its fields in their order, as JSON has them."""
    return json.loads(msgspec.json.encode(message))


def record_run(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-record-") as scratch:
        script = Path(scratch) / "train.py"
        script.write_text(SCRIPT)
        flags = [
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1",
            "--log-dir",
            scratch,
            "--redirects",
            "3",
        ]
        line = [sys.executable, "-m", "holdfast.run", *flags, script]
        subprocess.run(line, capture_output=True, check=False)
        (made,) = (path for path in Path(scratch).iterdir() if path.is_dir())
        for name in ("events.jsonl", "verdict.json"):
            text = (made / name).read_text()
            for private, public in (
                (str(made), "/runs/job"),
                (scratch, "/srv/job"),
                (socket.gethostname(), "node0"),
                (sys.prefix, "/usr"),
            ):
                text = text.replace(private, public)
            (folder / "run" / name).write_text(text)


def main() -> int:
    folder = RECORDED / __version__
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    record_wire(folder)
    record_run(folder)
    for step in (10, 20):
        saves.save(folder / "snapshots", step, items=SNAPSHOT_ITEMS)
    print(f"recorded: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

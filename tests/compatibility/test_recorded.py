"""What earlier versions wrote is read by this one: messages, run folders, snapshots. record.py makes the recordings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli import main
from holdfast.protocol import codec, session
from holdfast.protocol import messages as protocol
from holdfast.version import __version__
from tests.compatibility.record import RECORDED, SNAPSHOT_ITEMS, messages, plain
from tests.train.snapshots import saves

VERSIONS = sorted(path.name for path in RECORDED.iterdir())
WIRE = [(version, row) for version in VERSIONS for row in json.loads((RECORDED / version / "wire.json").read_text())]


def test_this_version_is_recorded() -> None:
    assert __version__ in VERSIONS, "run: python -m tests.compatibility.record"


def is_kept(then: Any, now: Any) -> bool:
    """Whether a value has all that it had: fields may have been added behind the others."""
    match then, now:
        case list(), list():
            return len(now) >= len(then) and all(map(is_kept, then, now))
        case dict(), dict():
            return all(name in now and is_kept(value, now[name]) for name, value in then.items())
        case _:
            return bool(then == now)


@pytest.mark.parametrize(("version", "row"), WIRE, ids=lambda value: str(value if isinstance(value, str) else ""))
def test_a_message_means_what_it_meant(version: str, row: dict[str, Any]) -> None:
    data = bytes.fromhex(row["bytes"])
    if "handshake" in row:
        message = msgspec.msgpack.decode(data, type=getattr(session, row["handshake"]))
    else:
        from_agent = row["message"] in {kind.__name__ for kind in protocol.AgentMessage.__subclasses__()}
        message = codec.decode_from_agent(data) if from_agent else codec.decode_from_coordinator(data)
        assert type(message).__name__ == row["message"]
    assert is_kept(row["value"], plain(message))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_kind_of_message_was_recorded(version: str) -> None:
    if version == __version__:
        assert {type(message).__name__ for message in messages()} == {
            row["message"] for at, row in WIRE if at == version and "message" in row
        }


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_folder_is_reported(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(RECORDED / version / "run")]) == 0
    shown = capsys.readouterr().out
    assert "the loss is nan" in shown
    assert "rank 1 on node0" in shown
    assert main(["report", "--json", str(RECORDED / version / "run")]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("version", VERSIONS)
def test_snapshots_are_whole(version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "snapshots"
    shutil.copytree(RECORDED / version / "snapshots", folder)
    newest = saves.newest(folder)
    assert newest.step == 20
    assert saves.load(newest) == [saves.content(20, rank, SNAPSHOT_ITEMS) for rank in range(2)]
    assert main(["snaps", "verify", str(folder)]) == 0, capsys.readouterr().err

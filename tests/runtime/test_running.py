"""The list of running agents: private, and cleared of the dead by whoever reads it."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.runtime import running
from holdfast.runtime.running import RunningAgent


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "running"))
    return tmp_path / "running"


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[str]:
    """A socket on which somebody listens."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        with running.reachable(path) as name:
            listening.bind(name)
        listening.listen()
        yield path


def entry(path: str, run_id: str = "x", began_epoch_s: float = 1.0) -> RunningAgent:
    return RunningAgent(
        run_id=run_id,
        endpoint="e:1",
        host="h",
        pid=os.getpid(),
        folder="",
        socket=path,
        began_epoch_s=began_epoch_s,
    )


def test_what_is_written_is_read_oldest_first(place: Path, ear: str) -> None:
    folder = running.private_folder()
    for run_id, began in (("late", 3.0), ("early", 2.0)):
        path = running.write(entry(ear, run_id, began), folder)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert [each.run_id for each in running.entries()] == ["early", "late"]
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_the_dead_are_cleared_away(place: Path, tmp_path: Path) -> None:
    folder = running.private_folder()
    left = tmp_path / "left"
    with socket.socket(socket.AF_UNIX) as listening, running.reachable(str(left)) as name:
        listening.bind(name)
    running.write(entry(str(left)), folder)
    running.write(entry(str(tmp_path / "never there")), folder)
    assert running.entries() == []
    assert list(place.iterdir()) == []
    assert not left.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"run_id": 7}', b"\xff"])
def test_what_no_agent_wrote_is_cleared_away(place: Path, content: bytes) -> None:
    (Path(running.private_folder()) / "1-2.json").write_bytes(content)
    assert running.entries() == []
    assert list(place.iterdir()) == []


def test_entries_are_no_links(place: Path, tmp_path: Path, ear: str) -> None:
    folder = Path(running.private_folder())
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_bytes(msgspec.json.encode(entry(ear)))
    (folder / "1-2.json").symlink_to(elsewhere)
    os.mkfifo(folder / "1-3.json")
    assert running.entries() == []
    assert elsewhere.exists()


def test_a_folder_that_others_may_enter_is_not_used(place: Path) -> None:
    place.mkdir(mode=0o755)
    place.chmod(0o755)
    with pytest.raises(OSError, match="not this user's alone"):
        running.private_folder()
    assert running.entries() == []


def test_a_folder_that_is_a_link_is_not_used(place: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        running.private_folder()
    assert running.entries() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_somebody_elses_folder_is_not_used(place: Path) -> None:
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)
    with pytest.raises(OSError, match="not this user's alone"):
        running.private_folder()


def test_where_entries_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_RUNTIME_DIR")
    uid = os.geteuid()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    places = [f"{tmp_path}/holdfast", f"/var/tmp/holdfast-{uid}", f"/tmp/holdfast-{uid}"]
    assert running.folders() == places
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert running.folders() == places[1:]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert running.folders() == places[1:], "of the user before su, or of a session that has ended"


def test_a_name_that_somebody_else_took_hides_no_job(tmp_path: Path, ear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(running, "TEMPORARY", str(tmp_path))
    foreign = tmp_path / f"holdfast-{os.geteuid()}"
    foreign.mkdir()
    foreign.chmod(0o777)
    for _ in range(2):
        folder = running.private_folder()
        assert Path(folder) != foreign
    written = running.write(entry(ear, "hidden"), folder)
    assert [each.run_id for each in running.entries()] == ["hidden"]
    running.remove(written)
    assert os.listdir(foreign) == []


def test_long_paths_are_reached(tmp_path: Path) -> None:
    path = tmp_path.joinpath(*["long" * 12] * 3) / "control.sock"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listening:
        with running.reachable(str(path)) as name:
            listening.bind(name)
        listening.listen()
        assert running.listens(str(path))
    assert not running.listens(str(path))


def test_names_that_are_no_text(place: Path, tmp_path: Path) -> None:
    """Linux takes any bytes for a name, and Python shows those that are no text as surrogates."""
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/s\xff")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fsencode(strange))  # type: ignore[arg-type]
        listening.listen()
        running.write(entry(strange, run_id="r\udcff"), running.private_folder())
        assert [(each.run_id, each.socket) for each in running.entries()] == [("r\udcff", strange)]


def test_the_last_agent_takes_the_folder_with_it(tmp_path: Path, ear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(running.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = running.private_folder()
    assert Path(folder).parent == tmp_path
    first, second = running.write(entry(ear), folder), running.write(entry(ear), folder)
    running.write(entry(str(tmp_path / "killed.sock")), folder)
    running.remove(first)
    assert os.listdir(folder) == [os.path.basename(second)]
    running.remove(second)
    assert not Path(folder).exists()
    assert Path(running.write(entry(ear), folder)).is_file()  # whoever saw it a moment before


def test_a_folder_that_somebody_named_stays(place: Path, ear: str) -> None:
    running.remove(running.write(entry(ear), str(place)))
    assert list(place.iterdir()) == []

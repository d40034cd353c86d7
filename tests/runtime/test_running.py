"""The list of running agents: private, and cleared of the dead by whoever reads it."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast import own_folders
from holdfast.protocol.errors import ControlRefusedError, ControlSilentError
from holdfast.runtime import running
from holdfast.runtime.running import RunningAgent

Write = Callable[[RunningAgent, str], running.WrittenEntry]


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


@pytest.fixture
def write() -> Iterator[Write]:
    """`running.write`; the agent ends with the test."""
    made: list[running.WrittenEntry] = []

    def written(entry: RunningAgent, folder: str) -> running.WrittenEntry:
        made.append(running.write(entry, folder))
        return made[-1]

    yield written
    for each in made:
        with contextlib.suppress(OSError):  # removed by the test
            os.close(each.fd)


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


def test_what_is_written_is_read_oldest_first(write: Write, place: Path, ear: str) -> None:
    folder = running.private_folder()
    for run_id, began in (("late", 3.0), ("early", 2.0)):
        path = write(entry(ear, run_id, began), folder).path
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert [each.run_id for each in running.entries()] == ["early", "late"]
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


AGENT = """
import os, sys
from holdfast.runtime import running
entry = running.RunningAgent(run_id="x", endpoint="e:1", host="h", pid=os.getpid(), folder="", socket=sys.argv[1], began_epoch_s=1.0)
written = running.write(entry, running.private_folder())
print(written.path, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def agent(path: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that has written its entry, and the entry."""
    line = [sys.executable, "-c", AGENT, path]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_the_dead_are_cleared_away(place: Path, tmp_path: Path) -> None:
    left = tmp_path / "left"
    with socket.socket(socket.AF_UNIX) as listening, running.reachable(str(left)) as name:
        listening.bind(name)
    for path in (str(left), str(tmp_path / "never there")):
        with agent(path) as (process, written):
            assert written.exists()
            process.kill()
    assert running.entries() == []
    assert list(place.iterdir()) == []
    assert not left.exists()


def test_what_is_in_the_place_of_a_dead_agents_socket_stays(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with agent(str(file)) as (process, _):
        process.kill()
    assert running.entries() == []
    assert list(place.iterdir()) == []
    assert file.read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"run_id": 7}', b"\xff"])
def test_what_cannot_be_read_stays(place: Path, content: bytes) -> None:
    """Another version of holdfast may have written it, and its agent may live."""
    file = Path(running.private_folder()) / "1-2.json"
    file.write_bytes(content)
    assert running.entries() == []
    assert file.read_bytes() == content


def test_a_job_whose_socket_is_not_visible_stays_in_the_list(place: Path, tmp_path: Path) -> None:
    """As from another mount namespace: the folder of entries is shared, the run folder is not."""
    with agent(str(tmp_path / "elsewhere.sock")) as (_, written):
        assert [each.hidden for each in running.entries()] == [True]
        assert written.exists()
        with pytest.raises(ControlSilentError, match="is not visible from here"):
            running.ask(running.entries()[0], "status")


def test_an_entry_without_a_lock_stays(place: Path, tmp_path: Path) -> None:
    """It is on a file system without locks, or of another machine whose locks are not known here."""
    folder = Path(running.private_folder())
    for name, found in (("1-1.json", {}), ("1-2.json", {"locked_on": "another boot"})):
        (folder / name).write_bytes(msgspec.json.encode(msgspec.structs.replace(entry("/gone"), **found)))
    assert running.entries() == []
    assert sorted(os.listdir(folder)) == ["1-1.json", "1-2.json"]


def test_after_a_restart_of_the_machine_its_entries_are_cleared_away(place: Path) -> None:
    old = msgspec.structs.replace(entry("/gone"), locked_on="another boot", host=socket.gethostname())
    (Path(running.private_folder()) / "1-1.json").write_bytes(msgspec.json.encode(old))
    assert running.entries() == []
    assert list(place.iterdir()) == []


def test_a_command_without_descriptors_deletes_nothing(write: Write, place: Path, ear: str) -> None:
    """It has one left for the folder, none for the entry, and in the next case none for the probe."""
    write(entry(ear), running.private_folder())
    for spare in range(1, 5):
        done = subprocess.run([sys.executable, "-c", FEW, str(spare)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert len(list(place.iterdir())) == 1, spare
    assert [each.hidden for each in running.entries()] == [False]


FEW = """
import os, resource, sys
from holdfast.runtime import running
import holdfast.linux
used = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + int(sys.argv[1]), used + int(sys.argv[1])))
running.entries()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_socket_of_another_user_gets_no_question(tmp_path: Path) -> None:
    """Another user exchanged a folder above the run folder."""
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents[:-2]:
        folder.chmod(folder.stat().st_mode | 0o011)
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        path.chmod(0o777)
        os.setegid(65534)
        os.seteuid(65534)
        try:
            with pytest.raises(ControlRefusedError, match="belongs to another user"):
                running.Call(entry(str(path)), "status")
        finally:
            os.seteuid(0)
            os.setegid(0)


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


def test_a_name_that_somebody_else_took_hides_no_job(
    write: Write, tmp_path: Path, ear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(own_folders, "TEMPORARY", str(tmp_path))
    foreign = tmp_path / f"holdfast-{os.geteuid()}"
    foreign.mkdir()
    foreign.chmod(0o777)
    for _ in range(2):
        folder = running.private_folder()
        assert Path(folder) != foreign
    written = write(entry(ear, "hidden"), folder)
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


def test_names_that_are_no_text(write: Write, place: Path, tmp_path: Path) -> None:
    """Linux takes any bytes for a name, and Python shows those that are no text as surrogates."""
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/s\xff")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fsencode(strange))  # type: ignore[arg-type]
        listening.listen()
        write(entry(strange, run_id="r\udcff"), running.private_folder())
        assert [(each.run_id, each.socket) for each in running.entries()] == [("r\udcff", strange)]


def test_the_last_agent_takes_the_folder_with_it(
    write: Write, tmp_path: Path, ear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(running.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = running.private_folder()
    assert Path(folder).parent == tmp_path
    first, second = write(entry(ear), folder), write(entry(ear), folder)
    with agent(str(tmp_path / "killed.sock")) as (process, killed):
        process.kill()
    assert killed.exists()
    running.remove(first)
    assert os.listdir(folder) == [os.path.basename(second.path)]
    running.remove(second)
    assert not Path(folder).exists()
    assert Path(write(entry(ear), folder).path).is_file()  # whoever saw it a moment before


def test_a_folder_that_somebody_named_stays(write: Write, place: Path, ear: str) -> None:
    running.remove(write(entry(ear), str(place)))
    assert list(place.iterdir()) == []

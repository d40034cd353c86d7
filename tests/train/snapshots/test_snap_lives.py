"""What lives of a job leave for the next one: failures, progress, marks on suspect snapshots."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.train.snapshots import changes, flush, folder, lives
from holdfast.train.snapshots.changes import Keep
from holdfast.train.snapshots.folder import mark_file
from holdfast.train.snapshots.layout import Key
from holdfast.train.snapshots.lives import JobHistory, LifeFailure
from tests.train.snapshots.saves import save

WITHIN = 20
FROM_60 = JobHistory(life="a", origin=Key(60, 1), best=75, failure="ValueError: step #")
AGAIN = LifeFailure("ValueError: step 71", 71)


def suspects(failure: LifeFailure | None, before: JobHistory = FROM_60, path: Path = Path("/nowhere")) -> list[Key]:
    return lives.suspects_of(before, failure, WITHIN, folder.survey(path), ())


@pytest.mark.parametrize(
    "failure",
    [
        AGAIN,
        LifeFailure("NotFiniteError: the loss is not finite in steps 61 to 63", 63),
        LifeFailure("RuntimeError: loss is NaN", 60),
    ],
)
def test_the_same_failure_or_a_number_that_is_not_finite_makes_a_snapshot_suspect(failure: LifeFailure) -> None:
    assert suspects(failure) == [Key(60, 1)]
    assert suspects(failure, replace(FROM_60, origin=None)) == []
    assert suspects(replace(failure, step=60 + WITHIN)) == [Key(60, 1)]
    assert suspects(replace(failure, step=61 + WITHIN)) == []
    assert suspects(replace(failure, step=59)) == []


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: another one",
        "",
        "exit code 3",
        "RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer",
        "DistNetworkError: nan",
        "torch.OutOfMemoryError: CUDA out of memory",
        "OutOfMemoryError: out of memory",
        "FileNotFoundError: /data/nan",
        "ReplicasDifferError: rank 0 and rank 1 differ in model.inf",
    ],
)
def test_other_failures_do_not(text: str) -> None:
    failure = LifeFailure(text, 71)
    assert (
        suspects(
            failure, replace(FROM_60, failure=failure.fingerprint if "other" not in text and "3" not in text else "x")
        )
        == []
    )
    assert suspects(None) == []


def test_exit_codes_are_told_apart() -> None:
    assert suspects(LifeFailure("exit code -11", 61), replace(FROM_60, failure="exit code -11")) == [Key(60, 1)]
    assert suspects(LifeFailure("exit code -6", 61), replace(FROM_60, failure="exit code -11")) == []


@pytest.mark.parametrize(
    ("told", "failure"),
    [
        ("lost", None),
        ("", None),
        ("failed 71 ValueError: step 71", AGAIN),
        ("failed 71 RuntimeError: Connection closed by peer", None),
        ("hung 71", LifeFailure("", 71)),
        ("failed much ValueError", None),
    ],
)
def test_the_launcher_s_word(told: str, failure: LifeFailure | None) -> None:
    assert LifeFailure.of_launcher(told) == failure


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise AttributeError("code")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\nlines"), "ValueError: two"),
        (SystemExit(3), "exit code 3"),
        (SystemExit("a text"), "exit code 1"),
        (SystemExit(0), ""),
        (SystemExit(75), ""),
        (SystemExit(143), ""),
        (KeyboardInterrupt(), ""),
        (ConnectionResetError("by peer"), ""),
        (UnprintableError(), "UnprintableError: (its __str__ fails)"),
    ],
)
def test_what_an_error_says(error: BaseException, text: str) -> None:
    assert lives.text_of(error) == text


def test_all_that_a_poisoned_life_saved_is_suspect(tmp_path: Path) -> None:
    for step in (40, 60, 70):
        save(tmp_path, step)
    changes.begin(tmp_path, 80)  # the saver has it in work
    found = folder.survey(tmp_path)
    in_memory = [Key(50, 600_000_000), Key(70, 700_000_000)]
    keys = lives.suspects_of(FROM_60, AGAIN, WITHIN, found, in_memory)
    assert keys == [Key(60, 1), Key(70, 1), Key(70, 700_000_000), Key(80, 1)]
    lives.mark(tmp_path, keys, "because")
    assert lives.suspects_of(FROM_60, AGAIN, WITHIN, folder.survey(tmp_path), in_memory) == []


def test_a_suspect_snapshot_is_not_used_and_not_deleted(tmp_path: Path) -> None:
    for step in (20, 40, 60):
        save(tmp_path, step)
    lives.mark(tmp_path, [Key(60, 1)], "because")
    found = folder.survey(tmp_path)
    assert [each.step for each in found.committed] == [20, 40]
    assert [each.step for each in found.suspects] == [60]
    assert flush.newest_on_disk(str(tmp_path)) == 40
    pruned = changes.prune(tmp_path, Keep(last=1))
    assert [each.step for each in pruned.kept] == [40]
    assert [path.name for path in pruned.deleted] == ["step_000000020.0001"]
    assert folder.survey(tmp_path).suspects
    lives.mark(tmp_path, [Key(40, 1)], "too")
    chosen = folder.choose(folder.survey(tmp_path))
    assert chosen is not None
    assert chosen.step == 60  # a suspect one is better than none
    lives.unmark(tmp_path, [Key(40, 1), Key(60, 1)])
    assert [each.step for each in folder.survey(tmp_path).committed] == [40, 60]


def test_lives_are_counted_until_one_comes_further() -> None:
    known = JobHistory(best=75, origin=Key(60, 1))
    for count in range(1, 4):
        known = known.after(AGAIN, 60, [Key(60, 1)], found_suspect=False)
        assert known.stalled == count
    assert known.after(None, 60, [Key(60, 1)], found_suspect=False).stalled == 3  # lost, killed, stopped: no word of it
    further = known.after(replace(AGAIN, step=76), 60, [Key(60, 1)], found_suspect=False)
    assert (further.stalled, further.best) == (0, 76)
    saved = known.after(None, 80, [Key(80, 1)], found_suspect=False)
    assert (saved.stalled, saved.best) == (0, 80)


def test_going_back_to_ever_older_snapshots_is_not_counted() -> None:
    known = JobHistory(best=75)
    for step in (60, 60, 50, 40):
        known = replace(known, origin=Key(step, 1)).after(AGAIN, 60, [Key(60, 1)], found_suspect=True)
        assert known.stalled == 0
    known = replace(known, origin=Key(60, 2)).after(AGAIN, 60, [Key(60, 2)], found_suspect=True)
    assert known.stalled == 1  # it had come from there again, and saved


def test_who_removes_the_newest_snapshots_begins_anew() -> None:
    known = replace(FROM_60, stalled=2).after(AGAIN, 40, [Key(40, 1)], found_suspect=False)
    assert (known.stalled, known.best) == (0, 71)


def test_the_file_keeps_the_oldest_step_under_another_name(tmp_path: Path) -> None:
    stalled = replace(FROM_60, oldest_begun=60)
    stalled.save(tmp_path)
    body = json.loads((tmp_path / lives.HISTORY).read_text())
    assert (body["floor"], "oldest_begun" in body) == (60, False)
    assert JobHistory.load(tmp_path) == stalled


def test_what_is_not_readable_is_not_there(tmp_path: Path) -> None:
    FROM_60.save(tmp_path)
    assert JobHistory.load(tmp_path) == FROM_60
    lives.note_failure(tmp_path, replace(AGAIN, life="a"))
    lives.note_failure(tmp_path, replace(AGAIN, life="b"))
    assert lives.noted_failure(tmp_path) == replace(AGAIN, life="a")  # the first one
    for text in (
        "",
        "[]",
        "{",
        '{"best": "x"}',
        '{"origin": 3}',
        '{"origin": ["a", 1]}',
        '{"unknown": 1}',
        '{"floor": 1.5}',
    ):
        (tmp_path / lives.HISTORY).write_text(text)
        assert JobHistory.load(tmp_path) == JobHistory(), text
        (tmp_path / lives.FAILURE).write_text(text)
        assert lives.noted_failure(tmp_path) is None
    lives.forget_failure(tmp_path)
    lives.forget_failure(tmp_path)
    assert not (tmp_path / lives.FAILURE).exists()


def test_the_shell_shows_and_removes_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (40, 60):
        save(tmp_path, step)
    lives.mark(tmp_path, [Key(60, 1), Key(50, 600_000_000)], "training failed at step 61")
    (tmp_path / mark_file(Key(40, 1)).replace("suspect", "suspicious")).touch()  # somebody's own file
    assert main(["snaps", "ls", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "suspect      step_000000060.0001  training failed at step 61" in text
    assert "suspect      step_000000050.600000000" in text
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["40", "60"]
    assert main(["snaps", "unmark", str(tmp_path), "--step", "60", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "unmarked": ["step_000000060.0001"]}
    assert main(["snaps", "unmark", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "unmarked  step_000000050.600000000\n"
    assert not folder.survey(tmp_path).marks
    assert main(["snaps", "unmark", str(tmp_path)]) == 0
    assert "has no suspect snapshot" in capsys.readouterr().out

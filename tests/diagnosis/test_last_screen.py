"""The last screen is bounded for every failure, and nothing that a program printed can change what it looks like."""

from __future__ import annotations

import traceback

import pytest
from msgspec import structs

from holdfast.diagnosis.causes import judge
from holdfast.diagnosis.screen import render
from holdfast.protocol.outcome import TEXT_BYTES_MAX, Evidence, Failure, Outcome, OutcomeKind
from holdfast.traceback_text import fewer_lines, shortened
from tests.corpus.telling import fails

LINES_MAX = 60


def chained(depth: int) -> Exception:
    error: Exception = raised(KeyError("the root"))
    for level in range(depth):
        cause, error = error, RuntimeError(f"level {level}")
        error.__cause__ = cause
        error = raised(error)
    return error


def noted(notes: int, text: str = "note") -> Exception:
    error = ValueError("with notes")
    for number in range(notes):
        error.add_note(f"{text} {number}")
    return error


def grouped(errors: int) -> Exception:
    return ExceptionGroup("several", [ValueError(f"sub {number}") for number in range(errors)])


def deep(depth: int) -> None:
    if not depth:
        raise ValueError("at the bottom")
    deep(depth - 1) if depth % 2 else exec("deep(depth - 1)", {"deep": deep, "depth": depth})


def raised(error: Exception) -> Exception:
    try:
        raise error  # noqa: TRY301
    except Exception as caught:  # noqa: BLE001
        return caught


def from_deep() -> Exception:
    try:
        deep(150)
    except ValueError as error:
        return error
    raise AssertionError


ERRORS = {
    "chain": lambda: chained(26),
    "long chain": lambda: chained(200),
    "notes": lambda: raised(noted(200)),
    "long notes": lambda: raised(noted(60, "n" * 3000)),
    "group": lambda: raised(grouped(100)),
    "nested": lambda: raised(ExceptionGroup("outer", [grouped(9) for _ in range(9)])),
    "long message": lambda: raised(ValueError("x" * 100_000)),
    "many lines": lambda: raised(ValueError("\n".join(map(str, range(3000))))),
    "deep": from_deep,
    "chain with lines": lambda: raised(ValueError("\n".join(["first", *"abc" * 100]))).with_traceback(None),
}


def screen(failure: Failure) -> list[str]:
    evidence = Evidence(generation=1, restarts=0, failures=(failure,), lost_nodes=(), gave_up="", hosts=("a",))
    verdict = judge(evidence)
    outcome = Outcome(kind=OutcomeKind.FAILED, exit_code=1, code=verdict.code, verdict=verdict)
    return render(outcome, "/tmp/run").splitlines()


def of(error: Exception) -> Failure:
    text = "".join(traceback.format_exception(error))
    message = f"{type(error).__name__}: {error}"[:4000]
    plain = structs.replace(fails(1), message=message, error_type=type(error).__name__)
    return structs.replace(plain, traceback=shortened(text, bytes_max=TEXT_BYTES_MAX), stderr_tail="")


@pytest.mark.parametrize("name", ERRORS)
def test_it_is_bounded_and_says_the_failure_again_at_the_end(name: str) -> None:
    failure = of(ERRORS[name]())
    assert len(failure.traceback.encode()) <= TEXT_BYTES_MAX
    lines = screen(failure)
    assert len(lines) <= LINES_MAX
    assert sum(map(len, lines)) <= LINES_MAX * 1000
    assert len(lines) <= 24 or lines[-1] == lines[0]


def test_of_a_long_chain_the_root_and_the_last_exception_are_whole() -> None:
    lines = screen(of(chained(200)))
    assert "KeyError: 'the root'" in lines
    assert "RuntimeError: level 199" in lines[-2:]
    assert any("more exceptions of this chain left out" in line for line in lines)
    assert "KeyError: 'the root'" in lines[0]


def test_of_a_long_message_the_beginning_is_shown() -> None:
    lines = screen(of(raised(noted(200))))
    assert "ValueError: with notes" in lines
    assert "note 0" in lines
    assert lines[-2] == "note 199"


@pytest.mark.parametrize("lines_max", [12, 20, 45])
@pytest.mark.parametrize("name", ERRORS)
def test_a_traceback_in_fewer_lines(name: str, lines_max: int) -> None:
    text = "".join(traceback.format_exception(ERRORS[name]()))
    assert len(fewer_lines(text, lines_max).splitlines()) <= lines_max


CONTROLS = "\x1b[2J\x1b[31m\x07 \x9b1A \u202e\u2066 \x00\x7f"


@pytest.mark.parametrize("where", ["message", "stderr", "victim"])
def test_control_characters_are_visible(where: str) -> None:
    failure = fails(1, f"ValueError: {CONTROLS}") if where == "message" else fails(1, code=3, stderr=f"bad {CONTROLS}")
    others = (fails(2, f"KeyError: {CONTROLS}", late=True),) if where == "victim" else ()
    evidence = Evidence(generation=1, restarts=0, failures=(failure, *others), lost_nodes=(), gave_up="", hosts=("a",))
    verdict = judge(evidence)
    text = render(Outcome(kind=OutcomeKind.FAILED, exit_code=1, code=verdict.code, verdict=verdict), "/tmp/run")
    for control in CONTROLS.replace("[2J", "").replace("[31m", "").replace("1A", "").replace(" ", ""):
        assert control not in text + verdict.cause
    assert "\\x1b[2J" in text


def test_a_traceback_that_the_program_went_on_after_is_not_shown() -> None:
    """The same rule as for the cause: it is shown if it is the last thing on stderr, whatever the exit code."""
    caught = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    x\nKeyError: 1\n'
    assert screen(fails(1, code=7, stderr=caught))[-1] == "KeyError: 1"
    last = screen(fails(1, code=7, stderr=caught + "no data left\n"))
    assert last[-1] == "no data left"
    assert any(line.startswith("last lines of rank 1's stderr") for line in last)


def test_the_last_lines_of_stdout_are_shown_if_stderr_is_empty() -> None:
    lines = screen(structs.replace(fails(1, code=2), stdout_tail="FATAL: checksum"))
    assert lines[-2:] == ["last lines of rank 1's stdout:", "FATAL: checksum"]

"""The last screen of a run: at most fifteen lines, then the user's own traceback, which comes last.

Pure: outcome in, text out. The same text on every node but for the folder.
"""

from __future__ import annotations

import re

from holdfast.core.outcome import Failure, Outcome, OutcomeKind, Verdict

LINES_MAX = 15
"""Of ours, the end of stderr among them where there is no traceback."""
LINE_CHARACTERS_MAX = 320
VICTIMS_SHOWN_MAX = 3
RANKS_SHOWN_MAX = 8
TRACEBACK = re.compile(r"^(?:Traceback \(most recent call last\):|Fatal Python error: )", re.MULTILINE)
FRAME = re.compile(r'^\s+File "[^"\n]+", line \d+', re.MULTILINE)
BENEATH = re.compile(
    r'^  File "[^"\n]*/holdfast/worker/\w+\.py", line \d+ in .*\n?|^\nExtension modules: .*\n?', re.MULTILINE
)
"""In what faulthandler writes: frames of what runs the script, and a list of all that was ever imported."""
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)


def render(outcome: Outcome, folder: str) -> str:
    """What the console says at the end; empty after a success that this node had a part in."""
    match outcome.kind:
        case OutcomeKind.SUCCEEDED:
            return f"holdfast: {outcome.message}" if outcome.message else ""
        case OutcomeKind.FAILED if outcome.verdict is not None:
            return _failed(outcome, outcome.verdict, folder)
        case OutcomeKind.SIGNALLED:
            return f"holdfast: {outcome.message}; exit code {outcome.exit_code}"
        case _:
            code = f"{outcome.code}: " if outcome.code else ""
            return f"holdfast: {code}{outcome.message}"


def _failed(outcome: Outcome, verdict: Verdict, folder: str) -> str:
    culprit = verdict.culprit
    restarts = f"{verdict.restarts} restart{'s' if verdict.restarts != 1 else ''}"
    lines = [_line(f"holdfast: {verdict.code}: job FAILED after {restarts}: {verdict.cause}")]

    def row(name: str, text: str) -> None:
        if text:
            lines.append(_line(f"  {name:<12} {text}"))

    if culprit is not None:
        lived = f", after {culprit.lived_s:.1f} s" if culprit.started else ""
        row("first", f"{_who(culprit)}, {_status(culprit)}{lived}, generation {verdict.generation}")
    alike, victims = _apart(verdict)
    row("the same", _ranks(alike))
    for victim in victims[:VICTIMS_SHOWN_MAX]:
        why = victim.message.splitlines()[0] if victim.message else _status(victim)
        row("because of it", f"{_who(victim)}: {why[:120]}")
    if len(victims) > VICTIMS_SHOWN_MAX:
        row("because of it", f"and {len(victims) - VICTIMS_SHOWN_MAX} more, see verdict.json")
    row("lost", ", ".join(verdict.lost_nodes))
    row("no restart", verdict.gave_up)
    row("do", verdict.advice)
    if culprit is not None:
        row("log", f"{culprit.stderr_file} on {culprit.host}" if culprit.stderr_file else "")
        row("error file", culprit.error_file)
    row("run folder", folder)
    row("exit code", str(outcome.exit_code))
    if culprit is not None:
        lines += _last_words(culprit, LINES_MAX - len(lines))
    return "\n".join(lines)


def _apart(verdict: Verdict) -> tuple[list[Failure], list[Failure]]:
    """Those that failed as the first one did, and those that failed because of it."""
    alike: list[Failure] = []
    victims: list[Failure] = []
    for each in verdict.collateral:
        same = verdict.culprit is not None and each.message and _same(each, verdict.culprit)
        (alike if same else victims).append(each)
    return alike, victims


def _same(one: Failure, other: Failure) -> bool:
    """But for the numbers in them: a rank, an address, a size."""
    return re.sub(r"\d+", "0", one.message[:200]) == re.sub(r"\d+", "0", other.message[:200])


def _ranks(failures: list[Failure]) -> str:
    if not failures:
        return ""
    ranks = sorted(failure.rank for failure in failures)
    shown = ", ".join(map(str, ranks[:RANKS_SHOWN_MAX]))
    more = f" and {len(ranks) - RANKS_SHOWN_MAX} more" if len(ranks) > RANKS_SHOWN_MAX else ""
    return f"on rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _last_words(culprit: Failure, room: int) -> list[str]:
    """The traceback if there is one, whole; else as much of stderr's end as there is room for."""
    if culprit.traceback:
        return culprit.traceback.rstrip().splitlines()
    tail = RANK_PREFIX.sub("", culprit.stderr_tail).rstrip()
    found = list(TRACEBACK.finditer(tail))
    if found:
        return BENEATH.sub("", tail[found[0].start() :]).splitlines()
    if FRAME.search(tail):
        return ["Traceback (most recent call last): [its head is in the log]", *tail.splitlines()]
    lines = [_line(line) for line in tail.splitlines() if line.strip()][-max(room - 1, 1) :]
    return [f"last lines of rank {culprit.rank}'s stderr:", *lines] if lines and room > 1 else []


def _line(text: str) -> str:
    """One line, not endless."""
    flat = " ".join(text.splitlines())
    return flat if len(flat) <= LINE_CHARACTERS_MAX else flat[: LINE_CHARACTERS_MAX - 1] + "…"


def _who(failure: Failure) -> str:
    return f"rank {failure.rank} (local {failure.local_rank}, pid {failure.pid}) on {failure.host}"


def _status(failure: Failure) -> str:
    hastened = " (stopped while it ended)" if failure.after_stop and failure.message else ""
    if failure.exit_code < 0:
        return f"signal {-failure.exit_code}{hastened}"
    return f"exit code {failure.exit_code}"

"""The last screen of a run: at most fifteen lines, then the user's own traceback, which comes last.

Pure: outcome in, text out. The same text on every node but for the folder.
"""

from __future__ import annotations

from holdfast.core.outcome import Failure, Outcome, OutcomeKind, Verdict

VICTIMS_SHOWN_MAX = 3
TAIL_LINES_MAX = 12


def render(outcome: Outcome, folder: str) -> str:
    """What the console says at the end; empty after a success."""
    match outcome.kind:
        case OutcomeKind.SUCCEEDED:
            return ""
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
    lines = [f"holdfast: {verdict.code}: job FAILED after {restarts}: {verdict.cause}"]

    def row(name: str, text: str) -> None:
        if text:
            lines.append(f"  {name:<12} {text}")

    if culprit is not None:
        lived = f", after {culprit.lived_s:.1f} s" if culprit.started else ""
        row("first", f"{_who(culprit)}, {_status(culprit)}{lived}, generation {verdict.generation}")
    for victim in verdict.collateral[:VICTIMS_SHOWN_MAX]:
        why = victim.message.splitlines()[0] if victim.message else _status(victim)
        row("because of it", f"{_who(victim)}: {why[:120]}")
    if len(verdict.collateral) > VICTIMS_SHOWN_MAX:
        row("because of it", f"and {len(verdict.collateral) - VICTIMS_SHOWN_MAX} more, see verdict.json")
    row("lost", ", ".join(verdict.lost_nodes))
    row("no restart", verdict.gave_up)
    row("do", verdict.advice)
    if culprit is not None:
        row("log", f"{culprit.stderr_file} on {culprit.host}" if culprit.stderr_file else "")
        row("error file", culprit.error_file)
    row("run folder", folder)
    row("exit code", str(outcome.exit_code))
    if culprit is not None:
        lines += _last_words(culprit)
    return "\n".join(lines)


def _last_words(culprit: Failure) -> list[str]:
    """The traceback if there is one, else the end of stderr."""
    if culprit.traceback:
        return culprit.traceback.rstrip().splitlines()
    tail = culprit.stderr_tail.splitlines()[-TAIL_LINES_MAX:]
    return [f"last lines of rank {culprit.rank}'s stderr:", *tail] if tail else []


def _who(failure: Failure) -> str:
    return f"rank {failure.rank} (local {failure.local_rank}, pid {failure.pid}) on {failure.host}"


def _status(failure: Failure) -> str:
    if failure.exit_code < 0:
        return f"signal {-failure.exit_code}"
    return f"exit code {failure.exit_code}"

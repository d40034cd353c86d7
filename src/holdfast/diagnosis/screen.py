"""The last screen of a run: at most fifteen lines, then the user's own traceback.

Pure: outcome in, text out. The text is the same on every node, except for the run folder and the path of the log.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast.protocol.outcome import Failure, Outcome, OutcomeKind, Verdict
from holdfast.text import spans

LINES_MAX = 15
"""Lines of holdfast, including the end of stderr if there is no traceback."""
LINE_CHARACTERS_MAX = 320
VICTIMS_SHOWN_MAX = 3
TRACEBACK = re.compile(r"^(?:Traceback \(most recent call last\):|Fatal Python error: )", re.MULTILINE)
FRAME = re.compile(r'^\s+File "[^"\n]+", line \d+', re.MULTILINE)
BENEATH = re.compile(
    r'^  File "[^"\n]*/holdfast/worker/\w+\.py", line \d+ in .*\n?|^\nExtension modules: .*\n?', re.MULTILINE
)
"""Parts of faulthandler's output to leave out: frames of the code that runs the script, and the list of modules."""
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)


def render(outcome: Outcome, folder: str, *, home: str = "", runs: str = "") -> str:
    """The text on the console at the end; empty after a success in which this node took part.

    `home`: the user's home folder; `runs`: the folder in which runs are found by name.
    """
    match outcome.kind:
        case OutcomeKind.SUCCEEDED:
            return f"holdfast: {outcome.message}" if outcome.message else ""
        case OutcomeKind.FAILED if outcome.verdict is not None:
            return _failed(outcome, outcome.verdict, _Folder(folder, home, runs))
        case OutcomeKind.SIGNALLED:
            return f"holdfast: {outcome.message}; exit code {outcome.exit_code}"
        case _:
            code = f"{outcome.code}: " if outcome.code else ""
            return f"holdfast: {code}{outcome.message}"


def how_it_ended(kind: str, exit_code: int, why: str = "") -> str:
    """
    >>> how_it_ended("signalled", 143, "ended by SIGTERM"), how_it_ended("failed", 3)
    ('signalled, exit code 143 (ended by SIGTERM)', 'failed, exit code 3')
    """
    return f"{kind}, exit code {exit_code}{f' ({why})' if why else ''}"


def render_again(outcome: Outcome, folder: str, *, home: str = "", runs: str = "") -> str:
    """The end of a run as `status` and `report` show it later, below how_it_ended. Also for a run without a verdict."""
    if outcome.kind is OutcomeKind.FAILED and outcome.verdict is not None:
        return render(outcome, folder, home=home, runs=runs)
    at = _Folder(folder, home, runs)
    rows = [("logs", f"holdfast logs {at.name}"), ("run folder", at.shown), ("exit code", str(outcome.exit_code))]
    return "\n".join(_row(name, text) for name, text in rows)


class _Folder(NamedTuple):
    """The run folder on this node, in its shortest notation."""

    path: str
    home: str
    runs: str

    @property
    def shown(self) -> str:
        inside = self.home and self.path.startswith(self.home.rstrip("/") + "/")
        return "~" + self.path[len(self.home.rstrip("/")) :] if inside else self.path

    @property
    def name(self) -> str:
        """The name by which commands find it, if it is the newest run of that name."""
        parent, _, name = self.path.rpartition("/")
        return name.rpartition("_")[0] if parent == self.runs else self.shown

    def log_of(self, culprit: Failure) -> str:
        """How to show the culprit's log if it is on this node; else where it is."""
        if self.path and culprit.stderr_file.startswith(self.path + "/"):
            return f"holdfast logs {self.name} --rank {culprit.rank}"
        return f"{culprit.stderr_file} on {culprit.host}" if culprit.stderr_file else ""


def _failed(outcome: Outcome, verdict: Verdict, folder: _Folder) -> str:
    culprit = verdict.culprit
    restarts = f"{verdict.restarts} restart{'s' if verdict.restarts != 1 else ''}"
    lines = [_line(f"holdfast: {verdict.code}: job FAILED after {restarts}: {verdict.cause}")]

    def row(name: str, text: str) -> None:
        if text:
            lines.append(_row(name, text))

    if culprit is not None:
        lived = f", after {culprit.lived_s:.1f} s" if culprit.started else ""
        row("first", f"{_who(culprit)}, {_status(culprit)}{lived}, generation {verdict.generation}")
    alike, victims = _apart(verdict)
    row("the same", _ranks(alike))
    groups = _by_words(victims)
    for words, ranks in list(groups.items())[:VICTIMS_SHOWN_MAX]:
        row("because of it", f"rank {spans(ranks)}: {words[:120]}; in {'its log' if len(ranks) == 1 else 'their logs'}")
    if len(groups) > VICTIMS_SHOWN_MAX:
        more = sum(map(len, list(groups.values())[VICTIMS_SHOWN_MAX:]))
        row("because of it", f"and {more} more, see verdict.json")
    row("lost", ", ".join(verdict.lost_nodes))
    row("no restart", verdict.gave_up)
    row("do", verdict.advice)
    if culprit is not None:
        row("log", folder.log_of(culprit))
    row("run folder", folder.shown)
    row("exit code", str(outcome.exit_code))
    if culprit is not None:
        lines += _last_words(culprit, LINES_MAX - len(lines))
    return "\n".join(lines)


def _apart(verdict: Verdict) -> tuple[list[Failure], list[Failure]]:
    """Failures with the same error as the first one, and failures that are consequences of it."""
    alike: list[Failure] = []
    victims: list[Failure] = []
    for each in verdict.collateral:
        same = verdict.culprit is not None and each.message and _same(each, verdict.culprit)
        (alike if same else victims).append(each)
    return alike, victims


def _by_words(victims: list[Failure]) -> dict[str, list[int]]:
    """Ranks by message. Messages that differ only in numbers count as one, with the text of the first."""
    groups: dict[str, tuple[str, list[int]]] = {}
    for victim in victims:
        words = victim.message.splitlines()[0] if victim.message else _status(victim)
        groups.setdefault(re.sub(r"\d+", "0", words), (words, []))[1].append(victim.rank)
    return dict(groups.values())


def _same(one: Failure, other: Failure) -> bool:
    """Whether the failures are equal except for numbers: a rank, an address, a size."""
    return re.sub(r"\d+", "0", one.message[:200]) == re.sub(r"\d+", "0", other.message[:200])


def _ranks(failures: list[Failure]) -> str:
    if not failures:
        return ""
    return f"on rank{'s' if len(failures) > 1 else ''} {spans(failure.rank for failure in failures)}"


def _last_words(culprit: Failure, room: int) -> list[str]:
    """The whole traceback if there is one; else the end of stderr in at most `room` lines."""
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


def _row(name: str, text: str) -> str:
    return _line(f"  {name:<12} {text}")


def _line(text: str) -> str:
    """The text as one line of limited length."""
    flat = " ".join(text.splitlines())
    return flat if len(flat) <= LINE_CHARACTERS_MAX else flat[: LINE_CHARACTERS_MAX - 1] + "…"


def _who(failure: Failure) -> str:
    return f"rank {failure.rank} (local {failure.local_rank}, pid {failure.pid}) on {failure.host}"


def _status(failure: Failure) -> str:
    hastened = " (stopped while it ended)" if failure.after_stop and failure.message else ""
    if failure.exit_code < 0:
        return f"signal {-failure.exit_code}{hastened}"
    return f"exit code {failure.exit_code}"

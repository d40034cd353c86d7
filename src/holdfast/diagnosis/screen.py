"""What users see of a run: its last screen, and the output of `holdfast status` and `holdfast stacks` while it runs.

The last screen has at most 15 lines, then the user's own traceback, together at most 60 lines. It is the same on every
node, except for the run folder and the path of the log. Equal stacks are shown once, with all their ranks.

PURE: outcome or view in, text out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, structs

from holdfast.protocol.outcome import Failure, Outcome, OutcomeKind, Verdict
from holdfast.protocol.rank_progress import (
    Frame,
    JobView,
    NodeView,
    RankSample,
    RankStack,
    RankStory,
    RankView,
    StacksView,
    Stage,
    is_library,
)
from holdfast.text import duration, plural, ranks_text, shortened, spans, spoken, visible
from holdfast.traceback_text import fewer_lines

if TYPE_CHECKING:
    from holdfast.diagnosis.places import Where

LINES_MAX = 15
"""Number of holdfast's lines, including the end of stderr if there is no traceback."""
SCREEN_LINES_MAX = 60
"""Number of lines of the whole last screen. A longer traceback loses its middle."""
TERMINAL_LINES = 24
"""Height of a small terminal. The first line of a longer screen, which names the cause, is repeated at the end."""
LINE_CHARACTERS_MAX = 320
TRACEBACK_LINE_CHARACTERS_MAX = 1000
VICTIMS_SHOWN_MAX = 3
VICTIM_CHARACTERS_MAX = 160
HUNG_LINES = 6
"""Number of lines for the end of stderr of a rank that hung, with its heading."""
FATAL = re.compile(r"^Fatal Python error: ", re.MULTILINE)
BENEATH = re.compile(
    r'^  File "[^"\n]*/holdfast/worker/\w+\.py", line \d+ in .*\n?|^\nExtension modules: .*\n?', re.MULTILINE
)
"""Parts of faulthandler's output to leave out: frames of the code that runs the script, and the list of modules."""
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)


def render(outcome: Outcome, folder: str, *, home: str = "", runs: str = "") -> str:
    """The text on the console at the end; empty after a success in which this node took part.

    `home` is the user's home folder, `runs` the folder in which runs are found by name.
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
    """The end of a run in one line.

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
        """The command that shows the culprit's log if it is on this node; else the log's path and host."""
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

    noticed = verdict.noticed_by
    if noticed is not None:
        row("noticed by", f"{_who(noticed)}, {_status(noticed)}, generation {verdict.generation}")
    if culprit is not None:
        lived = f", after {culprit.lived_s:.1f} s" if culprit.started else ""
        row("first", f"{_who(culprit)}, {_status(culprit)}{lived}, generation {verdict.generation}")

    row("collectives", verdict.collectives)
    alike, victims = _alike_and_victims(verdict)
    row("the same", _ranks(alike))
    groups = _by_message(victims)
    for message, ranks in list(groups.items())[:VICTIMS_SHOWN_MAX]:
        where = "its log" if len(ranks) == 1 else "their logs"
        row("because of it", f"{ranks_text(ranks)}: {_whole_words(message)}; in {where}")
    if len(groups) > VICTIMS_SHOWN_MAX:
        more = sum(map(len, list(groups.values())[VICTIMS_SHOWN_MAX:]))
        row("because of it", f"and {more} more, see verdict.json")

    row("lost", ", ".join(verdict.lost_nodes))
    row("no restart", verdict.gave_up)
    row("do", verdict.advice)
    shown = verdict.shown
    if shown is not None:
        row("log", folder.log_of(shown))
    row("run folder", folder.shown)
    row("exit code", str(outcome.exit_code))
    if shown is not None:
        lines += _last_output(shown, LINES_MAX - len(lines), SCREEN_LINES_MAX - 1 - len(lines))
    if len(lines) > TERMINAL_LINES:
        lines.append(lines[0])
    return "\n".join(lines)


def _alike_and_victims(verdict: Verdict) -> tuple[list[Failure], list[Failure]]:
    """The failures with the same error as the first one, and those that are consequences of it."""
    alike: list[Failure] = []
    victims: list[Failure] = []
    for each in verdict.collateral:
        same = verdict.culprit is not None and each.message and _same(each, verdict.culprit)
        (alike if same else victims).append(each)
    return alike, victims


def _by_message(victims: list[Failure]) -> dict[str, list[int]]:
    """Ranks by message. Messages that differ only in numbers count as one, with the text of the first."""
    groups: dict[str, tuple[str, list[int]]] = {}
    for victim in victims:
        message = victim.message.splitlines()[0] if victim.message else _status(victim)
        groups.setdefault(re.sub(r"\d+", "0", message), (message, []))[1].append(victim.rank)
    return dict(groups.values())


def _same(one: Failure, other: Failure) -> bool:
    """Whether the failures are equal except for numbers: a rank, an address, a size."""
    return re.sub(r"\d+", "0", one.message[:200]) == re.sub(r"\d+", "0", other.message[:200])


def _ranks(failures: list[Failure]) -> str:
    if not failures:
        return ""
    return f"on {ranks_text(failure.rank for failure in failures)}"


def _last_output(culprit: Failure, room: int, lines_max: int) -> list[str]:
    """The end of what the culprit wrote: the traceback that explains its end if there is one, in at most `lines_max`
    lines; else the last lines of stderr, or of stdout, in at most `room` lines. Before that, its stack if it hung."""
    # Its patterns take a few milliseconds, which the end of a job without a failure need not wait for.
    from holdfast.diagnosis.causes.exception_text import final_traceback

    if culprit.stack:
        output = _last_output(structs.replace(culprit, stack="", traceback=""), max(room, HUNG_LINES), HUNG_LINES)
        stack = fewer_lines(culprit.stack, max(lines_max - len(output) - 1, HUNG_LINES)).splitlines()
        return [f"where rank {culprit.rank} hung:", *map(_line, stack), *output]

    traceback = culprit.traceback or final_traceback(culprit.stderr_tail, culprit.exit_code)
    tail = RANK_PREFIX.sub("", culprit.stderr_tail).rstrip()
    fatal = FATAL.search(tail)
    if not traceback and fatal:
        before = tail[: fatal.start()].rstrip().rpartition("\n")[2]  # what native code wrote before it aborted
        traceback = "\n".join([*([before] if before else []), BENEATH.sub("", tail[fatal.start() :])])
    if traceback:
        if traceback.lstrip().startswith("File "):  # agents send the end of stderr, which can begin in a traceback
            traceback = f"Traceback (most recent call last): [its head is in the log]\n{traceback}"
        return [
            shortened(visible(line), TRACEBACK_LINE_CHARACTERS_MAX)
            for line in fewer_lines(traceback, lines_max).splitlines()
        ]

    for name, text in (("stderr", tail), ("stdout", culprit.stdout_tail)):
        lines = [_line(line) for line in text.splitlines() if line.strip()][-max(room - 1, 1) :]
        if lines:
            return [f"last lines of rank {culprit.rank}'s {name}:", *lines] if room > 1 else []
    return []


def _row(name: str, text: str) -> str:
    return _line(f"  {name:<12} {text}")


def _line(text: str) -> str:
    """The text as one line of limited length."""
    return shortened(visible(" ".join(text.splitlines())), LINE_CHARACTERS_MAX)


def _whole_words(text: str) -> str:
    """The text up to the last word that fits: half an address looks like a whole one."""
    if len(text) <= VICTIM_CHARACTERS_MAX:
        return text
    shown = text[:VICTIM_CHARACTERS_MAX]
    return f"{shown.rpartition(' ')[0] or shown}…"


def _who(failure: Failure) -> str:
    return f"rank {failure.rank} (local {failure.local_rank}, pid {failure.pid}) on {failure.host}"


def _status(failure: Failure) -> str:
    hastened = " (stopped while it ended)" if failure.after_stop and failure.message else ""
    if failure.exit_code < 0:
        return f"signal {-failure.exit_code}{hastened}"
    return f"exit code {failure.exit_code}"


# --- status -----------------------------------------------------------------------------------------------------------

RANKS_SHOWN_MAX = 16
"""Number of ranks up to which `status` shows a line for each; for larger jobs only if that is requested."""

Row = tuple[str, ...]


def status_lines(view: JobView, *, ranks: bool | None = None) -> list[str]:
    """The lines of `holdfast status`. With `ranks` None there is a line for each rank if there are few."""
    lines = [headline(view), progress_line(view)]
    if nodes := nodes_line(view):
        lines.append(nodes)
    if view.why:
        lines.append(f"previous generation ended: {view.why}")
    if view.spares_why:
        lines.append(view.spares_why)
    if view.nodes:
        lines += ["", *columns([NODE_HEADINGS, *(node_row(node) for node in view.nodes)])]
    with_host = [(node.host, rank) for node in view.nodes for rank in node.ranks]
    shown = len(with_host) <= RANKS_SHOWN_MAX if ranks is None else ranks
    if with_host and shown:
        with_host.sort(key=lambda each: each[1].rank)
        lines += ["", *columns([RANK_HEADINGS, *(rank_row(host, rank) for host, rank in with_host)])]
    if view.notices:
        lines += ["", *view.notices]
    return lines


def headline(view: JobView) -> str:
    at_work = [node for node in view.nodes if node.group_rank is not None]
    size = f"{plural(view.world_size, 'rank')} on {plural(len(at_work), 'node')}, " if at_work else ""
    return (
        f"run {spoken(view.run_id)}: {view.phase} for {duration(view.since_s)}, generation {view.generation}, {size}"
        f"restarts {view.restarts} of {view.restarts_max}"
    )


def nodes_line(view: JobView) -> str:
    """What the job would do with more nodes; empty: nothing."""
    at_work = sum(node.group_rank is not None for node in view.nodes)
    if at_work == 0 < view.nodes_min:
        return f"{len(view.nodes)} of at least {plural(view.nodes_min, 'node')} have joined"
    return f"it can use up to {plural(view.nodes_max, 'node')}" if at_work < view.nodes_max else ""


def progress_line(view: JobView) -> str:
    ranks = _in_training(rank for node in view.nodes for rank in node.ranks)
    parts = []
    if any(rank.stage is Stage.STEPPING for rank in ranks):
        if view.job_steps:
            parts.append(f"step {view.job_step} of {view.job_steps}")
        else:
            from_zero = view.generation > 1 and not all(rank.counts_job for rank in ranks)
            since = f" since the start of generation {view.generation}" if from_zero else ""
            parts.append(f"step {between([rank.steps for rank in ranks])}{since}")
        rate = steps_per_s(ranks)
        parts += [f"{rate:.3g} steps/s"] if rate else []
        age = last_step(ranks)
        parts += [f"last step {age}"] if age else []
        parts += [f"about {duration(view.left_s)} left"] if view.left_s else []
    elif ranks:
        parts.append("no step yet")
    if view.job_s > 0:
        share = f"{min(1.0, view.training_s / view.job_s):.0%} of {duration(view.job_s)}"
        parts.append(f"effective training time {share}")
    return ", ".join(parts)


NODE_HEADINGS: Row = ("NODE", "GROUP RANK", "STATE", "RANKS", "STEP", "STEPS/S", "LAST STEP", "HEARD")
RANK_HEADINGS: Row = ("RANK", "NODE", "LOCAL", "PID", "STAGE", "STEP", "STEP TIME", "OWN PART", "LAST STEP", "WHERE")


def node_row(node: NodeView) -> Row:
    rate = steps_per_s(node.ranks)
    return (
        node.host,
        "" if node.group_rank is None else str(node.group_rank),
        node.state,
        spans(rank.rank for rank in node.ranks),
        between([rank.steps for rank in _in_training(node.ranks)]),
        f"{rate:.3g}" if rate else "",
        last_step(node.ranks),
        f"{duration(node.heard_s)} ago",
    )


def rank_row(host: str, rank: RankView) -> Row:
    return (
        str(rank.rank),
        host,
        str(rank.local_rank),
        str(rank.pid or ""),
        (rank.standing or rank.stage).value,
        str(rank.steps) if rank.stage is not Stage.SPARE else "",
        f"{rank.step_s * 1e3:.3g} ms" if rank.step_s else "",
        f"{rank.own_s * 1e3:.3g} ms" if rank.own_s else "",
        last_step([rank]),
        rank.place,
    )


def _in_training(ranks: Iterable[RankView]) -> list[RankView]:
    """All but the spares, whose step is of an earlier generation."""
    return [rank for rank in ranks if rank.stage is not Stage.SPARE]


def last_step(ranks: Sequence[RankView]) -> str:
    """The age of the oldest of the ranks' newest steps, as `3.2 s ago`; empty: no rank has made a step."""
    ages = [rank.age_s for rank in ranks if rank.stage is Stage.STEPPING]
    return f"{duration(max(ages))} ago" if ages else ""


def steps_per_s(ranks: Sequence[RankView]) -> float:
    """Steps per second, from the median of the ranks' median steps; 0: unknown, or in a hang."""
    known = [rank.step_s for rank in ranks if rank.step_s > 0 and rank.standing is None]
    from statistics import median  # loads much that a run itself never needs

    return 1 / median(known) if known else 0.0


def between(numbers: Sequence[int]) -> str:
    """The smallest and the largest of these numbers.

    >>> between([7, 9, 7]), between([7]), between([])
    ('7-9', '7', '')
    """
    if not numbers:
        return ""
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least}-{most}"


def columns(rows: Sequence[Row]) -> list[str]:
    """The rows as aligned columns, without columns that are empty in all rows."""
    used = [index for index in range(len(rows[0])) if any(row[index] for row in rows[1:])]
    widths = {index: max(len(row[index]) for row in rows) for index in used}
    return ["  ".join(row[index].ljust(widths[index]) for index in used).rstrip() for row in rows]


# --- stacks -----------------------------------------------------------------------------------------------------------

PIDS_SHOWN_MAX = 16
"""Number of processes that a group of ranks lists without --full."""
NOT_RUNNING = ("T", "t", "Z", "X", "")
"""States of the kernel in which a stack does not show what a rank does."""


class Group(Struct, frozen=True):
    """Ranks that are at the same place."""

    ranks: tuple[RankStack, ...]
    frames: tuple[Frame, ...]
    """The frames, innermost first; empty: the ranks did not answer."""

    @property
    def place(self) -> str:
        """The place of one of the ranks, with its verb: `waits in all_reduce at train.py:42`, `is in fetch at
        data.py:17`."""
        return self._where.described()

    def described(self, who: str) -> str:
        """The place of all of them, with their names: `ranks 0-2 wait in all_reduce at train.py:42`."""
        return f"{who} {self._where.described(len(self.ranks))}"

    def order(self) -> tuple[bool, int, int]:
        """Sort key. Ranks that wait for no other come first, since they may be the ones that the others wait for."""
        waits, size = self._where.waits, len(self.ranks)
        return waits, -size if waits else size, self.ranks[0].rank

    @property
    def listed(self) -> tuple[RankStack, ...]:
        """The ranks whose processes are listed below the place: several at one that names a process."""
        state = not self.frames or self.ranks[0].state in NOT_RUNNING
        return self.ranks if len(self.ranks) > 1 and state else ()

    @property
    def _where(self) -> Where:
        first = self.ranks[0]
        pid = 0 if self.listed else first.pid
        sample = RankSample(
            first.local_rank, pid, first.state, first.cpu_s, self.frames, first.note, first.file, first.source
        )
        from holdfast.diagnosis.places import where_is  # of no use to the last screen of a run

        return where_is(RankStory(first.rank, first.host, first.local_rank, 0.0, (sample,)))


def group(view: StacksView) -> list[Group]:
    """The ranks grouped by place: first those that do not wait for others, the smallest group first; then those that
    wait, the largest group first."""
    by_stack: dict[tuple[int, str], list[RankStack]] = defaultdict(list)
    for rank in view.ranks:
        by_stack[rank.stack, rank.state if rank.stack < 0 or rank.state in NOT_RUNNING else ""].append(rank)
    found = [Group(tuple(ranks), view.stacks[stack] if stack >= 0 else ()) for (stack, _), ranks in by_stack.items()]
    return sorted(found, key=Group.order)


def stack_lines(view: StacksView, *, full: bool = False) -> list[str]:
    """The lines of `holdfast stacks`. Without `full`, each stack has only its innermost frame and the user's own."""
    groups = group(view)
    of = f" of {view.world_size}" if len(view.ranks) != view.world_size else ""
    where = f"run {spoken(view.run_id)}, generation {view.generation}"
    if not groups and not view.silent:
        return [f"{where}: no worker runs now"]
    lines = [f"{where}: {plural(len(view.ranks), 'rank')}{of} at {plural(len(groups), 'place')}"]
    for each in groups:
        lines += ["", *group_lines(each, full=full)]
    if view.silent:
        lines += ["", f"no answer in time from {', '.join(view.silent)}"]
    return lines


def group_lines(each: Group, *, full: bool) -> list[str]:
    ranks = each.ranks
    hosts = sorted({rank.host for rank in ranks})
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} nodes"
    lines = [each.described(f"{ranks_text(rank.rank for rank in ranks)} on {where}")]
    frames = each.frames if full else own_frames(each.frames)
    lines += [f"    {frame.function}  {frame.file}:{frame.line}" for frame in frames]
    if len(frames) < len(each.frames):
        lines.append(f"    … {plural(len(each.frames) - len(frames), 'frame')} of libraries not shown (--full)")
    shown = each.listed if full else each.listed[:PIDS_SHOWN_MAX]
    lines += [f"    rank {rank.rank}: process {rank.pid} on {rank.host}" for rank in shown if rank.pid]
    if len(shown) < len(each.listed):
        lines.append(f"    … {plural(len(each.listed) - len(shown), 'rank')} more (--full)")
    sources = {rank.source for rank in ranks if rank.source}
    lines += [f"    > {source}" for source in sorted(sources)]
    lines += [f"    rank {rank.rank}: {rank.note}" for rank in ranks if rank.note]
    if full:
        lines += [line for rank in ranks for line in thread_lines(rank)]
        lines += [f"    rank {rank.rank}, pid {rank.pid} on {rank.host}: {rank.file}" for rank in ranks if rank.file]
    return lines


def thread_lines(rank: RankStack) -> list[str]:
    """Lines about a rank's other threads; the stack above them is the main thread's."""
    lines = []
    for number, frames in enumerate(rank.threads, 1):
        lines.append(f"    rank {rank.rank}, other thread {number}:")
        lines += [f"        {frame.function}  {frame.file}:{frame.line}" for frame in frames]
    return lines


def own_frames(frames: Sequence[Frame]) -> list[Frame]:
    """The innermost frame and the frames of the user's own code."""
    return [frame for index, frame in enumerate(frames) if index == 0 or not is_library(frame.file)]

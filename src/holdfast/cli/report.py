"""`holdfast report [RUN ...]` and `holdfast explain [CODE ...]`.

The first shows how a run, running or ended, used its time, and the duration of each part of its starts; the second the
meaning of a code, the evidence for it, and what to do. Both work offline.

Knows the output; runs/ reads the journals, diagnosis/history.py knows their meaning, diagnosis/reference.py that of
codes.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import textwrap
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TypedDict

from msgspec.structs import asdict

from holdfast.cli import say
from holdfast.cli.printing import Parser, print_json, print_table
from holdfast.diagnosis.history import (
    PHASES,
    Activity,
    Generation,
    History,
    KeptKernels,
    Survival,
    Timeline,
    history,
    timeline,
)
from holdfast.diagnosis.reference import Explanation, explanations, headings, nearest_codes, normal_code, search
from holdfast.protocol.errors import UsageError
from holdfast.protocol.exit_codes import EXIT_CODES
from holdfast.run_folder import default_log_dir
from holdfast.runs.copies_report import CopiesData, ResumedData, copies_of
from holdfast.runs.finding import WITHOUT_VERDICT, agent_lives, ending, newest_ended, run_folders, screen_of
from holdfast.runs.history_data import CourseData, HistoryData, as_json, history_as_json
from holdfast.runs.journal_reader import first_outcome, read_journal
from holdfast.text import duration, plural, spoken

HEADINGS = {"process_group": "group", "first_step": "step 1"}
MIB = 2**20


class Uses(TypedDict):
    """Part of the report."""

    history: HistoryData | None
    """null: no generation was started on these nodes."""
    copies: CopiesData | None
    """Copies of states in memory on other nodes; null: there were none."""


class Explained(TypedDict):
    """The codes that were asked for."""

    codes: list[Explanation]


JSON_FORMS = {"report": ((CourseData, Uses),), "explain": ((Explained,),)}


def main(argv: Sequence[str]) -> int:
    """Run `holdfast report` with these arguments. Returns the exit status. Raises HoldfastError."""
    chosen = parser().parse_args(argv)
    folders = [folder for run in chosen.runs for folder in folders_of(run)] or [newest_run()]
    journals = [list(read_journal(folder, say)) for folder in folders]
    course, past = timeline(journals), history(journals)
    course.end = course.end or unrecorded_end(course.nodes, folders)
    if chosen.html is not None:
        write_page(chosen.html, folders)
    if chosen.json:
        print_json(as_json(course) | {"history": history_as_json(past), "copies": copies_of(journals)})
    elif chosen.html is None:
        print_report(course, past)
        print_copies(copies_of(journals), course)
        print_end(folders)
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="holdfast report", description="Show how a run went, also while it runs.")
    made.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run id, or the run folder of each node (<log dir>/<run id>_<8 characters>); by default the newest run",
    )
    made.add_argument("--html", metavar="FILE", help="write one page with pictures; - is stdout")
    made.add_json()
    return made


def folders_of(run: str) -> list[Path]:
    """The given folder, or the folders of a run id on this host. Raises NoRunError."""
    if os.sep in run or os.path.isdir(run):
        return [Path(run)]
    return run_folders(run)


def newest_run() -> Path:
    """The newest run folder here. Raises UsageError if there is none."""
    if folder := newest_ended(None):
        return folder
    raise UsageError(f"no run in {default_log_dir()}; name a run folder: holdfast report FOLDER")


def unrecorded_end(nodes: Sequence[str], folders: Sequence[Path]) -> str:
    """The end of a run of this host in whose journals there is none, as `holdfast status` has it; empty: it may run.

    The folders of other hosts may lie here, too, on shared storage: nothing here shows whether their agents live.
    """
    here = socket.gethostname().partition(".")[0]
    if set(nodes) != {here} or any(map(agent_lives, folders)):
        return ""
    return next((end.removeprefix(": ") for end in map(ending, folders) if end), WITHOUT_VERDICT)


def write_page(place: str, folders: Sequence[Path]) -> None:
    """Write the page of --html. Raises UsageError when the file cannot be written."""
    # Imported by name, since the dashboard imports the commands. This part of it needs no further package.
    page = import_module("holdfast.dashboard.saved_page").render(folders)
    if place == "-":
        print(page, end="")
        return
    try:
        Path(place).write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"--html {place}: {error.strerror or error}") from error
    print(place)


def print_history(course: Timeline, past: History) -> None:
    parts = [f"{doing.value} {duration(seconds)}" for doing in Activity if (seconds := past.spent_s(doing)) > 0]
    effective = f"; effective training time {past.effective:.1%}" if past.effective is not None else ""
    print(f"{duration(past.total_s)}: {', '.join(parts)}{effective}")
    if past.lost_steps:
        print(f"restarts lost {plural(past.lost_steps, 'step')}")
    why = {generation.number: generation.why for generation in course.generations}
    for each in past.survivals:
        print(survival_text(each, why.get(each.generation, "")))


def survival_text(each: Survival, why: str) -> str:
    """A line about a loss after which others went on.

    >>> survival_text(Survival(2, 7, 0.21, 0, 11.2), "rank 3 on b was lost (killed by SIGKILL)")
    'rank 3 on b was lost (killed by SIGKILL): 7 ranks went on after 0.21 s; 0 steps lost; replaced after 11 s'
    """
    parts = [
        f"{plural(each.ranks, 'rank')} went on after {each.went_on_s:.2f} s",
        f"{plural(each.steps_lost, 'step')} lost",
        *([f"replaced after {duration(each.replaced_s)}"] if each.replaced_s is not None else []),
    ]
    return f"{why or f'generation {each.generation - 1} lost a rank'}: {'; '.join(parts)}"


def print_report(course: Timeline, past: History | None = None) -> None:
    ending = f"ended: {course.end}" if course.end else "not ended"
    size = plural(len(course.generations), "generation")
    print(f"run {spoken(course.run_id)} on {', '.join(course.nodes)}: {size}, {ending}")
    if past is not None and past.stretches:
        print_history(course, past)
    if course.preloaded:
        print(f"preloaded: {'; '.join(course.preloaded)}")
    if course.standbys:
        print(f"standby: {course.standbys} workers parked, {course.standby_own_bytes / MIB:.1f} MiB of their own")
    for kept in course.kernels:
        print(f"compiled kernels: {kernels_text(kept)}")
    if course.generations:
        print("\nseconds until the first step, by phase (the slowest of these nodes):")
        titles = [HEADINGS.get(phase, phase) for phase in PHASES]
        rows = [("GEN", "BEGAN", "RANKS", *(title.upper() for title in titles), "TOTAL", "WHY")]
        print_table([*rows, *(row(each) for each in course.generations)])


def kernels_text(kept: KeptKernels) -> str:
    """A line about the folder of one node.

    >>> kernels_text(KeptKernels("a", "/tmp/c", True, "", 3 * MIB, MIB))
    'a: /tmp/c, with entries of earlier jobs; 3.0 MiB at the end, 1.0 MiB removed'
    >>> kernels_text(KeptKernels("a", "/tmp/c", False, seeded_bytes=2 * MIB, copy_errors=["/s: no answer"]))
    'a: /tmp/c, empty at the start; 2.0 MiB copied from shared storage; /s: no answer'
    """
    parts = ["with entries of earlier jobs" if kept.had_entries else "empty at the start"]
    if kept.bytes is not None:
        removed = f", {kept.removed_bytes / MIB:.1f} MiB removed" if kept.removed_bytes else ""
        parts.append(f"{kept.bytes / MIB:.1f} MiB at the end{removed}")
    if kept.error:
        parts.append(kept.error)
    if kept.seeded_bytes is not None:
        parts.append(f"{kept.seeded_bytes / MIB:.1f} MiB copied from shared storage")
    if kept.shared_bytes is not None:
        parts.append(f"{kept.shared_bytes / MIB:.1f} MiB copied to it")
    parts += kept.copy_errors
    return f"{kept.node}: {kept.folder}, {'; '.join(parts)}"


def print_copies(copies: CopiesData | None, course: Timeline) -> None:
    if copies is None:
        return
    text = f"copies on other nodes: {plural(copies['sent'], 'state')} sent ({copies['sent_bytes'] / MIB:.0f} MiB)"
    if copies["newest_step"] is not None:
        text += f", the newest of step {copies['newest_step']}"
    if copies["skipped_steps"]:
        text += f"; {plural(copies['skipped_steps'], 'step')} skipped, as the copy before was still on its way"
    if copies["failed"]:
        text += f"; {copies['failed']} failed, the last one: {copies['last_failure']}"
    print(text)
    why = {generation.number: generation.why for generation in course.generations}
    for each in copies["resumed"]:
        print(resumed_text(each, why.get(each["generation"], "")))


def resumed_text(fetched: ResumedData, why: str) -> str:
    """A line about a generation that began from copies.

    >>> resumed_text({"generation": 2, "step": 40, "states": 2, "slowest_s": 1.25}, "node b was lost")
    'node b was lost: resumed from copies on other nodes at step 40; 2 states fetched, the slowest in 1.25 s'
    """
    fetch = f"{plural(fetched['states'], 'state')} fetched, the slowest in {fetched['slowest_s']:.2f} s"
    begun = why or f"generation {fetched['generation']}"
    return f"{begun}: resumed from copies on other nodes at step {fetched['step']}; {fetch}"


def safe_text(copies: CopiesData) -> str:
    """A line about the step from which training would go on.

    >>> safe_text({"survivable_step": 40, "skipped_since": 2})
    'if a node is lost now, training goes on from step 40; 2 steps not copied since'
    """
    step, skipped = copies["survivable_step"], copies["skipped_since"]
    since = f"; {plural(skipped, 'step')} not copied since" if skipped else ""
    if step is None:
        return f"if a node is lost now, training goes on from the disk: no step has been copied for all ranks{since}"
    return f"if a node is lost now, training goes on from step {step}{since}"


def print_end(folders: Sequence[Path]) -> None:
    """Print the last screen, from the first node that has it."""
    end = first_outcome(folders)
    if end is not None:
        print(f"\n{screen_of(*end)}")


def row(generation: Generation) -> tuple[str, ...]:
    began = time.strftime("%H:%M:%S", time.localtime(generation.began_epoch_s)) if generation.began_epoch_s else ""
    ranks = str(generation.world_size or "")
    phases = [f"{generation.phases_s[phase]:.3f}" if phase in generation.phases_s else "" for phase in PHASES]
    why = generation.why or ("start" if generation.number == 1 else "")
    return (str(generation.number), began, ranks, *phases, f"{generation.total_s:.3f}", why)


WIDTH = 100


def main_explain(argv: Sequence[str]) -> int:
    """Run `holdfast explain` with these arguments. Returns the exit status. Raises HoldfastError."""
    chosen = explain_parser().parse_args(argv)
    known = explanations()
    if len(chosen.codes) > 1 and normal_code(chosen.codes[0]) not in known:
        chosen.codes = [" ".join(chosen.codes)]  # words without quotes
    if len(chosen.codes) == 1 and normal_code(chosen.codes[0]) not in known:
        found = search(chosen.codes[0])
        meaning = "" if chosen.json else exit_code_text(chosen.codes[0])  # it is no code with an explanation
        if meaning:
            print(meaning, end="\n\n" if found else "\n")
        if found:
            return show_found(found, as_json=chosen.json)
        if meaning:
            return 0
    wanted = [explanation_of(code, known) for code in chosen.codes] or list(known.values())
    if chosen.json:
        print_json({"codes": [asdict(each) for each in wanted]})
    elif chosen.codes:
        print("\n\n".join(explained(each) for each in wanted))
    else:
        for start, heading in headings().items():
            print(f"{start}xx  {heading}")
            print_table([(f"  {each.code}", each.name) for each in wanted if each.code.startswith(start)])
            print()
        print("holdfast explain CODE explains a code; holdfast explain WORDS searches: holdfast explain exit code 137")
    return 0


def exit_code_text(text: str) -> str:
    """The meaning of an exit code of holdfast that is named as `exit code 75` or `75`; empty: none is named."""
    named = re.fullmatch(r"(?:exit )?(?:code|status)? *(\d{1,3})", text.strip().lower())
    return next(
        (f"exit code {each.number}: {each.meaning}" for each in EXIT_CODES if named and each.number == int(named[1])),
        "",
    )


def show_found(found: list[Explanation], *, as_json: bool) -> int:
    """Print the results of a search: a single one in full."""
    if as_json:
        print_json({"codes": [asdict(each) for each in found]})
    elif len(found) == 1:
        print(explained(found[0]))
    else:
        print_table([(each.code, each.name) for each in found])
        print(f"\nholdfast explain {found[0].code} explains the first.")
    return 0


def explain_parser() -> argparse.ArgumentParser:
    made = Parser(prog="holdfast explain", description="Explain what a code means and what to do about it.")
    made.add_argument(
        "codes",
        nargs="*",
        metavar="CODE",
        help="a code such as HF211, or words to search for; without it all codes are listed",
    )
    made.add_json()
    return made


def explanation_of(code: str, known: dict[str, Explanation]) -> Explanation:
    """The explanation of a code. Raises UsageError that names the nearest code."""
    found = known.get(normal_code(code))
    if found is None:
        near = ", ".join(f"{each} ({known[each].name})" for each in nearest_codes(code))
        raise UsageError(f"no code {code!r}; " + (f"did you mean {near}?" if near else "`holdfast explain` lists all"))
    return found


def explained(each: Explanation) -> str:
    rows = [("cause", each.cause), ("evidence", each.evidence), ("fix", each.fix)]
    rows += [row for row in (("wrong", each.wrong), ("right", each.right)) if row[1]]
    if each.exit_code is not None:
        rows.append(("exit code", str(each.exit_code)))
    lines = [f"{each.code}: {each.name}"]
    for name, what in rows:
        wrapped = textwrap.wrap(what, WIDTH - 14, break_long_words=False, break_on_hyphens=False)
        lines += [f"  {name if number == 0 else '':<12}{line}" for number, line in enumerate(wrapped)]
    return "\n".join(lines)

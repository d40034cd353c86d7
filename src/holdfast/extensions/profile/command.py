"""`holdfast profile`: has ranks of a running job profiled, and shows the result."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from holdfast.cli.asking import ask_job
from holdfast.cli.printing import AboutRun, Parser, named, print_json
from holdfast.extensions.profile.messages import ASKED_S_MAX, NAME, ProfileView, profile_request
from holdfast.protocol.errors import UsageError
from holdfast.protocol.ranks_text import ranks_of

EXIT_NOT_PROFILED = 1
PROFILED_STEPS = 5
JSON_FORMS = {"profile": ((AboutRun, ProfileView),)}


def main_profile(argv: Sequence[str]) -> int:
    """Run `holdfast profile` with these arguments. Returns 0 if every rank was profiled. Raises HoldfastError."""
    chosen = profile_parser().parse_args(argv)
    if chosen.steps is not None and chosen.seconds is not None:
        raise UsageError("--steps and --seconds: give one of them")
    steps = PROFILED_STEPS if chosen.steps is None else chosen.steps
    wanted = profile_request(ranks_of([chosen.ranks], "RANKS"), steps, chosen.seconds, time.strftime(NAME))
    entry, view = ask_job(chosen.run, "profile", ProfileView, wanted, within_s=ASKED_S_MAX)
    if chosen.json:
        print_json({"run": entry.name, **named(view)})
    else:
        print("\n".join(profile_lines(view)))
    return EXIT_NOT_PROFILED if view.silent or any(rank.why for rank in view.ranks) else 0


def profile_lines(view: ProfileView) -> Iterator[str]:
    """The lines about profiles. Only the operations of the first rank are shown; the others have theirs in a file."""
    first = next((rank for rank in view.ranks if rank.operations), None)
    if first is not None:
        yield f"rank {first.rank}: the most expensive operations"
        yield f"{'own time':>12}  {'with calls':>12}  {'calls':>7}  operation"
        for each in first.operations:
            yield f"{each.self_s * 1e3:9.3f} ms  {each.total_s * 1e3:9.3f} ms  {each.calls:7}  {each.name}"
        yield ""
    for rank in view.ranks:
        for problem in filter(None, (rank.why, rank.note)):
            yield f"rank {rank.rank} on {rank.host}: {problem}"
        yield from (f"rank {rank.rank} on {rank.host}: {file}" for file in rank.files)
    yield from (f"{host} did not answer" for host in view.silent)
    if first is not None:
        yield "open a trace in https://ui.perfetto.dev or chrome://tracing, a *.speedscope.json in https://speedscope.app"


def profile_parser() -> Parser:
    made = Parser(
        prog="holdfast profile",
        description="Profile ranks of a running job with torch's profiler, and with py-spy where it is installed. "
        "Files go to the run folder, below profiles/.",
    )
    made.add_argument("ranks", metavar="RANKS", help="3, 0-7 or 1,5")
    made.add_run()
    made.add_argument("--steps", type=int, metavar="N", help=f"the next N steps of the optimizer ({PROFILED_STEPS})")
    made.add_argument("--seconds", type=float, metavar="S", help="the next S seconds instead, also without steps")
    made.add_json()
    return made

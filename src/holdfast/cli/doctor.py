"""`holdfast doctor [options of a run]`: checks this node, and with the same line on several nodes each pair of them.

Knows the line and the output. It takes the line of `holdfast run` as it is, script and all, and starts nothing of
it: facts are gathered by doctor and judged by doctor.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cli import config, grammar
from holdfast.cli.option_table import FLAG, FLOAT, OPTIONS, TEXT, Option
from holdfast.cli.option_table import line as help_line
from holdfast.protocol.errors import RendezvousConfigError, UsageError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from holdfast.cli.grammar import Parsed
    from holdfast.cli.rendezvous import RendezvousOptions
    from holdfast.doctor.findings import DoctorFinding, LocalFacts
    from holdfast.doctor.joint import JointOptions, JointResult
    from holdfast.protocol.options import Endpoint

ALL_REDUCE = "a small one with gloo: auto (where all nodes have torch) or off"
OWN = tuple(
    Option(name, kind, default, "doctor", text, metavar, env=False, choices=choices, ours=True)
    for name, kind, default, text, metavar, choices in (
        ("--timeout", FLOAT, 60.0, "how long to wait for the other nodes, and for each check", "S", ()),
        ("--all-reduce", TEXT, "auto", ALL_REDUCE, "auto|off", ("auto", "off")),
        ("--strict", FLAG, False, "exit code 10 for warnings, which are 0 otherwise", "", ()),
        ("--json", FLAG, False, "print JSON", "", ()),
    )
)
TABLE = (*OPTIONS, *OWN)
USED = (
    *("--nnodes", "--nproc-per-node", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    *("--master-addr", "--master-port", "--local-addr", "--log-dir"),
)
"""Options of a run that matter here; the others are accepted."""
TIMEOUT_S_MAX = 3600.0
LOCAL_TORCH_S_MIN = 60.0
BUSY_S = 2.0
"""After this time without output a line reports what is in progress."""


class Found(NamedTuple):
    """The results to print."""

    findings: tuple[DoctorFinding, ...]
    facts: LocalFacts
    joint: JointResult | None
    """None: this node was checked alone."""


def main(argv: Sequence[str]) -> int:
    """Run `holdfast doctor` with these arguments; returns the exit status. Raises HoldfastError."""
    parsed = grammar.parse(argv, os.environ, TABLE, needs_script=False, configure=config.configure)
    if parsed.values.help:
        print(usage())
        return 0
    if parsed.values.version:
        from holdfast.cli import print_version

        return print_version()
    if not 0 < parsed.values.timeout <= TIMEOUT_S_MAX:
        raise parsed.error("timeout", UsageError, f"must be a positive number of seconds, {TIMEOUT_S_MAX:g} at most")
    found = look(parsed)
    from holdfast.doctor.findings import exit_code, render

    strict: bool = parsed.values.strict
    if parsed.values.json:
        from holdfast.cli.printing import print_json

        print_json(as_json(found, strict=strict))
    else:
        print(render(found.findings, strict=strict))
    return exit_code(found.findings, strict=strict)


def usage() -> str:
    used = [option for option in OPTIONS if option.name in USED]
    return "\n".join(
        [
            "usage: holdfast doctor [options] [the rest of a line of holdfast run]",
            "",
            "Checks this node: Python, torch, GPUs, memory, limits, clock, names, interfaces, ports. With --nnodes and",
            "--rdzv-endpoint, on all nodes at once: every pair of them too. Nothing of the job is started.",
            "Exit codes: 0 pass or warn (10 with --strict), 20 retry, 30 fatal; 2 for a line that makes no sense.",
            "",
            "options:",
            *(help_line(option) for option in OWN),
            "",
            "as in holdfast run (its other options are accepted, and without effect):",
            *(help_line(option) for option in used),
        ]
    )


def look(parsed: Parsed) -> Found:
    """Check this node, and the others. Raises CallerError for an invalid line."""
    import asyncio

    from holdfast.cli.rendezvous import resolve
    from holdfast.protocol.policy import Limits
    from holdfast.runtime.secret_variables import forget_secrets

    notices = list(parsed.notices)
    place = resolve(parsed, os.environ, patience=Limits(), notices=notices)
    forget_secrets()
    for notice in notices:
        say(notice)
    together = place.job.max_nodes > 1 and not place.standalone
    if together and (place.etcd is not None or place.third_party is not None):
        raise RendezvousConfigError(
            f"--rdzv-backend {place.job.backend}: doctor's nodes meet at a port of one of them; "
            "give --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
        )
    return asyncio.run(examine(parsed, place, together=together))


async def examine(parsed: Parsed, place: RendezvousOptions, *, together: bool) -> Found:
    import asyncio

    from holdfast.cli.program import interpreter
    from holdfast.doctor.facts import FactsRequest, gather_facts
    from holdfast.doctor.joint import check_together
    from holdfast.doctor.local import examine as examine_facts
    from holdfast.doctor.together import examine_together

    python = interpreter(os.environ)
    timeout_s: float = parsed.values.timeout
    asked = FactsRequest(
        python=python,
        nproc=number_of_workers(parsed),
        nodes=place.job.max_nodes,
        log_dir=log_folder(parsed),
        endpoint=endpoint_of(place),
        try_port=not together,  # the joint check binds it otherwise
        environ=os.environ,
        torch_s_max=max(timeout_s, LOCAL_TORCH_S_MIN),
    )
    facts = asyncio.create_task(gather_facts(asked))
    saying = asyncio.create_task(say_busy(facts))
    if not together:
        known = await facts
        await saying
        return Found(examine_facts(known), known, None)
    joint = await check_together(joint_options(parsed, place, python), facts, examine_facts, say)
    known = await facts
    await saying
    findings = list(examine_facts(known))
    if joint.check is not None:
        findings += examine_together(joint.check, joint.me)
    if joint.trouble is not None:
        findings.append(joint.trouble)
    return Found(tuple(findings), known, joint)


async def say_busy(facts: asyncio.Task[LocalFacts]) -> None:
    """Reports that the check goes on: importing torch takes long, and nothing else is printed before the end."""
    import asyncio
    import time

    from holdfast.protocol.policy import Pauses

    began = time.monotonic()
    pauses = Pauses.begin(began, BUSY_S)
    while not facts.done():
        await asyncio.wait([facts], timeout=max(0.0, pauses.at_s - time.monotonic()))
        if not facts.done() and pauses.due(now := time.monotonic()):
            say(f"looking at this node for {now - began:.0f} s; importing torch takes longest")


def joint_options(parsed: Parsed, place: RendezvousOptions, python: str) -> JointOptions:
    from holdfast.doctor.joint import JointOptions

    is_host = place.is_host
    if is_host is None and place.job.fixed_ranks and place.node_rank:
        is_host = False  # static: the endpoint is node 0's
    return JointOptions(
        endpoint=place.endpoint,
        run_id=place.job.run_id,
        nodes=(place.job.min_nodes, place.job.max_nodes),
        token=place.token,
        is_host=is_host,
        local_addr=parsed.values.local_addr,
        timeout_s=parsed.values.timeout,
        reduce=parsed.values.all_reduce == "auto",
        python=python,
    )


def endpoint_of(place: RendezvousOptions) -> Endpoint | None:
    return None if place.standalone or not place.endpoint.port else place.endpoint


def number_of_workers(parsed: Parsed) -> int:
    """The number of workers of this node. Raises ProcessesError."""
    from holdfast.cli.devices import count_processes
    from holdfast.protocol.errors import ProcessesError

    try:
        return count_processes(parsed.values.nproc_per_node, os.environ).number
    except ProcessesError as error:
        raise parsed.error("nproc_per_node", ProcessesError, str(error)) from None


def log_folder(parsed: Parsed) -> str | None:
    from holdfast.supervisor.log_layout import default_log_dir

    if parsed.values.log_dir == os.devnull:
        return None
    return os.path.abspath(parsed.values.log_dir or default_log_dir())


def as_json(found: Found, *, strict: bool = False) -> dict[str, object]:
    """The output of --json: findings, facts, and every pair."""
    import msgspec

    from holdfast.doctor.findings import as_json as findings_json

    document: dict[str, object] = {"host": found.facts.host, **findings_json(found.findings, strict=strict)}
    check = found.joint.check if found.joint is not None else None
    if check is not None:
        document["nodes"] = [
            {"name": name, **(msgspec.to_builtins(report.summary) if report is not None else {"silent": True})}
            for name, report in zip(check.came, check.reports, strict=True)
        ]
        document["pairs"] = [
            {"from": check.came[start], **msgspec.to_builtins(link), "to": check.came[link.to]}
            for start, report in enumerate(check.reports)
            if report is not None
            for link in report.links
        ]
    document["facts"] = msgspec.to_builtins(found.facts)
    return document


def say(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr, flush=True)

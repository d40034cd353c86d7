"""The line of another node, made of what was given here, be it by flag, variable or file. Starts nothing."""

from __future__ import annotations

import shlex
import socket
from typing import TYPE_CHECKING

from holdfast.cli.grammar import ABOUT_US
from holdfast.cli.options import FLAG, HOSTS, LIST, Option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.cli.grammar import Parsed
    from holdfast.core.options import RunOptions

ONLY_HERE = frozenset({*ABOUT_US, "plan", "config", "no_config"})
STARTED_BY_OTHERS = ("SLURM_STEP_ID", "KUBERNETES_SERVICE_HOST")
"""Variables that are set where no person starts the other nodes."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def words_elsewhere(parsed: Parsed, table: Sequence[Option], settled: Mapping[str, str | None]) -> list[str]:
    """The line of another agent: what was given, however it was, and what is settled (None: left out)."""
    words = []
    for option in table:
        if option.dest in settled or option.group == HOSTS or option.dest in ONLY_HERE:
            continue
        if parsed.given(option.dest):
            words += words_of(option, getattr(parsed.values, option.dest))
    for dest, text in settled.items():
        name = "--" + dest.replace("_", "-")
        if text is not None:
            words.append(f"{name}={text}" if text else name)
    return [*words, "--", parsed.values.training_script, *parsed.values.training_script_args]


def words_of(option: Option, value: object) -> list[str]:
    if option.kind == FLAG:
        return [option.name] if value else []
    if option.kind == LIST:
        assert isinstance(value, (list, tuple))
        return [f"{option.name}=" + ",".join(str(item).replace(",", ",,") for item in value)]
    return [] if value is None else [f"{option.name}={value}"]


def line_of_others(
    parsed: Parsed, command: str, table: Sequence[Option], options: RunOptions, environ: Mapping[str, str]
) -> str:
    """What a person has to type on each other node; empty where there is none, or something else starts them."""
    job = options.job
    if options.standalone or job.max_nodes == 1 or any(name in environ for name in STARTED_BY_OTHERS):
        return ""
    settled: dict[str, str | None] = {"node_rank": None, "local_addr": None}
    place, own = options.endpoint, socket.gethostname()
    is_static = job.fixed_ranks and not parsed.given("rdzv_endpoint")
    if options.etcd is None and options.third_party is None and place.host in LOOPBACK_NAMES:
        settled |= {"master_addr": own} if is_static else {"rdzv_endpoint": f"{own}:{place.port}"}
    if job.fixed_ranks:
        settled["node_rank"] = str(1 - (options.node_rank or 0)) if job.max_nodes == 2 else "RANK"
    words = words_elsewhere(parsed, table, settled)
    if not parsed.values.training_script.startswith("-"):
        words.remove("--")
    return shlex.join(["holdfast", command, *words])

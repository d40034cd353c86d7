"""`holdfast drain`, `exclude` and `readmit`: which hosts take part in a running job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypedDict

from holdfast.cli.asking import ask_job
from holdfast.cli.printing import Parser, SentToNodes, print_json
from holdfast.protocol.errors import UsageError
from holdfast.protocol.extension import Sent
from holdfast.text import plural, seconds_of

EXCLUDED = "1h"

ABOUT_HOST = {
    "drain": "Have the nodes of one host leave a running job, after its workers have saved.",
    "exclude": "Have the nodes of one host leave a running job, as by `drain`, and keep the host out for a time.",
    "readmit": "Let a host that is excluded from a running job take part again.",
}


class AboutHost(TypedDict):
    """Part of the answer."""

    host: str


JSON_FORMS = dict.fromkeys(ABOUT_HOST, ((SentToNodes, AboutHost),))


def host_parser(question: str) -> Parser:
    made = Parser(prog=f"holdfast {question}", description=ABOUT_HOST[question])
    made.add_argument("host", metavar="HOST", help="as `holdfast status` shows it")
    made.add_run()
    made.add_json()
    if question == "exclude":
        usual = f"how long: 90s, 30min, 1h or 1d (default: {EXCLUDED})"
        made.add_argument("--for", dest="time", default=EXCLUDED, metavar="TIME", help=usual)
    return made


def ask_about_host(question: str, argv: Sequence[str]) -> int:
    """Ask the job to drain, exclude or readmit a host. Returns 0 when that is being done, else raises
    ControlRefusedError."""
    chosen = host_parser(question).parse_args(argv)
    text = getattr(chosen, "time", "0")
    for_s = seconds_of(text)
    if question == "exclude" and for_s is None:
        raise UsageError(f"--for {text}: write a time like 90s, 30min or 1h")
    entry, answer = ask_job(chosen.run, question, Sent, {"host": chosen.host, "for_s": for_s or 0.0})
    if chosen.json:
        print_json({"run": entry.name, "host": chosen.host, "nodes": answer.nodes})
    elif question == "readmit":
        print(f"{entry.name}: {chosen.host} may take part")
    else:
        print(f"{entry.name}: {question} {chosen.host}: sent to {plural(answer.nodes, 'node')}")
    return 0


main_drain, main_exclude, main_readmit = (partial(ask_about_host, question) for question in ABOUT_HOST)
drain_parser, exclude_parser, readmit_parser = (partial(host_parser, question) for question in ABOUT_HOST)

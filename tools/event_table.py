"""Make docs/events.md from the table of holdfast.diagnosis.reference, so that the two cannot differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.diagnosis.reference import EventGroup, EventKind, Field, event_table

PATH = Path(__file__).resolve().parent.parent / "docs" / "events.md"

HEAD = """# events.jsonl: what happened on a node

This page is made from `src/holdfast/diagnosis/events.toml` by `make fmt`. Tests compare the records of real jobs with it.

Every agent writes `events.jsonl` into its run folder (`<log dir>/<run id>_<8 characters>`): one JSON object per line, complete
when the line ends. It is written by a thread of its own: a disk that stalls costs events, never training. `holdfast report`
reads it ([report.md](report.md)); other tools may. A later version may add events and fields; those that are here keep their meaning.

```
{"time": 1718000000.1, "monotonic": 512.8, "event": "worker_started", "generation": 1, "local_rank": 0, "rank": 4, "pid": 4711}
```

Every record has

"""

TAIL = """
## torchrun's events: `--event-log-handler`

`--event-log-handler console` writes torchelastic's events, one JSON object per line, to stderr, as torchrun does: `name`
(`torchelastic.worker.status.START`, `SUCCEEDED`, `FAILED`, `TERMINATED`, `RENDEZVOUS`, `ASSIGN_WORKER_RANKS`), `source` (`AGENT` or
`WORKER`), `timestamp` and `metadata` with torchrun's keys. `null` (the default) and `dynamic_rendezvous` write nothing. Other names
are refused before anything is started; torch 2.13 has no way to register more.

Two things are better than there: `timestamp` is milliseconds since 1970 (torchrun writes 0), and the agent's `FAILED` is written when
workers failed (torchrun tells `SUCCEEDED`). In `metadata.metadata` numbers are numbers, and not lists of one.
"""


def render() -> str:
    """The whole page."""
    return HEAD + fields_table(event_table().always) + "\n" + "\n".join(map(group_text, event_table().group)) + TAIL


def group_text(group: EventGroup) -> str:
    return f"## {group.title}\n\n" + "\n".join(event_text(kind) for kind in group.event)


def event_text(kind: EventKind) -> str:
    text = f"### `{kind.name}`\n\n{kind.when[0].upper()}{kind.when[1:]}.\n"
    return text + ("\n" + fields_table(kind.fields) if kind.fields else "")


def fields_table(fields: tuple[Field, ...]) -> str:
    return "\n".join(["| field | value | what it tells |", "|---|---|---|", *rows(fields)]) + "\n"


def rows(fields: tuple[Field, ...]) -> Iterator[str]:
    for field in fields:
        kind = field.kind.value + (" or null" if field.null else "") + (", not always" if field.optional else "")
        yield f"| `{field.name}` | {kind} | {field.words} |"

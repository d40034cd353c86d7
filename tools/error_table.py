"""Make docs/errors.md from the classes of holdfast.protocol.errors and the texts of verdicts and doctor: they cannot differ."""

from __future__ import annotations

from pathlib import Path

from holdfast.diagnosis.reference import all_errors, finding_texts, verdict_texts
from holdfast.protocol import errors

PATH = Path(__file__).resolve().parent.parent / "docs" / "errors.md"

HEAD = """# Errors and exit codes

This page is made by `make fmt` from `src/holdfast/protocol/errors.py` and `diagnosis/codes.toml`. Codes are never reused.

An error of the command line, the configuration or the machine is one or two lines on stderr that start with its code, and nothing was
started. `holdfast run` never answers bad input with a traceback of its own.

## Exit codes

| code | meaning |
|---|---|
| 0 | every worker ended with 0 |
| the worker's own | the first failing worker's exit code, where a worker failed |
| 128+N | the first failing worker, or this command, was ended by signal N |
| {failure} | the job failed and no worker was to blame: a node was lost, too few nodes came |
| {usage} | the caller's fault: bad usage, bad configuration, a missing script |
| {internal} | a fault of holdfast itself |
| {requeue} | preempted: please put the job back into the queue |
| {hung} | the job hung: it was ended by `--hang-timeout`, or by a time-out of its own while holdfast had reported a hang |
| {no_progress} | restarts did not come past the step that the job had reached before: please do not put it back into the queue |

## Error codes

| code | whose fault | exit code | name | when |
|---|---|---|---|---|
"""

VERDICTS = """
## Verdicts

A job that fails ends with a verdict, on the screen and in `verdict.json`. Its code says what failed first; HF240 to HF251 are said while
a job runs, HF307 when a node joins. `holdfast explain CODE` says what was seen and what to do, offline.

| code | meaning |
|---|---|
"""

DOCTORS = """
## What `holdfast doctor` finds

| code | what may be wrong |
|---|---|
"""

WHOSE = {
    errors.Fault.CALLER: "the caller's",
    errors.Fault.WORKER: "a worker's",
    errors.Fault.PEER: "another node's",
    errors.Fault.STORAGE: "the storage's",
    errors.Fault.OURS: "holdfast's",
}


def exit_text(error: type[errors.HoldfastError]) -> str:
    return "the worker's own" if issubclass(error, errors.WorkerError) else str(error.exit_code)


def render() -> str:
    """The whole page."""
    head = HEAD.format(
        failure=errors.EXIT_FAILURE,
        usage=errors.EXIT_USAGE,
        internal=errors.EXIT_INTERNAL,
        requeue=errors.EXIT_REQUEUE,
        hung=errors.EXIT_HUNG,
        no_progress=errors.EXIT_NO_PROGRESS,
    )
    rows = [
        f"| {error.code} | {WHOSE[error.fault]} | {exit_text(error)} | `{error.__name__}` | "
        f"{' '.join((error.__doc__ or '').split())} |"
        for error in sorted(all_errors(), key=lambda error: error.code)
    ]
    verdicts = [f"| {code} | {text.name} |" for code, text in sorted(verdict_texts().items())]
    doctors = [f"| {code} | {each.cause} |" for code, each in sorted(finding_texts().items())]
    return "\n".join([head + "\n".join(rows), VERDICTS + "\n".join(verdicts), DOCTORS + "\n".join(doctors), ""])

"""Make docs/errors.md from the classes of holdfast.protocol.errors and the texts of verdicts and doctor: they cannot differ."""

from __future__ import annotations

from pathlib import Path

from holdfast.diagnosis.reference import all_errors, finding_texts, verdict_texts
from holdfast.protocol import errors
from holdfast.protocol.exit_codes import EXIT_CODES

PATH = Path(__file__).resolve().parent.parent / "docs" / "errors.md"

HEAD = """# Errors and exit codes

This page is made by `make fmt` from `errors.py` and `exit_codes.py` in `src/holdfast/protocol`, and `diagnosis/codes.toml`. Codes are never reused.

An error of the command line, the configuration or the machine is one or two lines on stderr that start with its code, and nothing was
started. `holdfast run` never answers bad input with a traceback of its own.

## Exit codes

| code | meaning |
|---|---|
| 0 | every worker ended with 0 |
| the worker's own | the first failing worker's exit code, where a worker failed |
| 128+N | the first failing worker, or this command, was ended by signal N |
{exit_codes}

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
    head = HEAD.format(exit_codes="\n".join(f"| {each.number} | {each.meaning} |" for each in EXIT_CODES))
    rows = [
        f"| {error.code} | {WHOSE[error.fault]} | {exit_text(error)} | `{error.__name__}` | "
        f"{' '.join((error.__doc__ or '').split())} |"
        for error in sorted(all_errors(), key=lambda error: error.code)
    ]
    verdicts = [f"| {code} | {text.name} |" for code, text in sorted(verdict_texts().items())]
    doctors = [f"| {code} | {each.cause} |" for code, each in sorted(finding_texts().items())]
    return "\n".join([head + "\n".join(rows), VERDICTS + "\n".join(verdicts), DOCTORS + "\n".join(doctors), ""])

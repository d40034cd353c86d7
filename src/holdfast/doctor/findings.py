"""Makes and renders findings: lines for users, data for JSON, the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.protocol.doctor_facts import DoctorFinding, Level
from holdfast.text import listed

KIB, MIB, GIB = 2**10, 2**20, 2**30


def passed(code: str, what: str, why: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=Level.PASS, what=what, why=why)


def warn(code: str, what: str, why: str, fix: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=Level.WARN, what=what, why=why, fix=fix)


def retry(code: str, what: str, why: str, fix: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=Level.RETRY, what=what, why=why, fix=fix)


def fatal(code: str, what: str, why: str, fix: str) -> DoctorFinding:
    return DoctorFinding(code=code, level=Level.FATAL, what=what, why=why, fix=fix)


def size(bytes_: float) -> str:
    """`1.5 GiB`, `64 MiB`."""
    if bytes_ >= GIB:
        return f"{bytes_ / GIB:.3g} GiB" if bytes_ < 1000 * GIB else f"{bytes_ / GIB / 1024:.3g} TiB"
    return f"{bytes_ / MIB:.3g} MiB" if bytes_ >= MIB else f"{bytes_ / KIB:.3g} KiB"


def rate(bytes_s: float) -> str:
    """In bits per second: `940 Mbit/s`."""
    bits = bytes_s * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def span(seconds: float) -> str:
    """`0.12 ms`, `3.4 s`."""
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


def named(names: list[str] | tuple[str, ...], shown_max: int = 6) -> str:
    """`a, b and 4 more`."""
    return listed(names, shown_max)


MARKS = {Level.PASS: "ok", Level.WARN: "WARN", Level.RETRY: "RETRY", Level.FATAL: "FATAL"}
WHAT_WIDTH = 20


def worst(findings: Sequence[DoctorFinding]) -> Level:
    return max((finding.level for finding in findings), key=lambda level: level.exit_code, default=Level.PASS)


def exit_code(findings: Sequence[DoctorFinding], *, strict: bool) -> int:
    """Exit code of `holdfast doctor`. With `strict` a warning stops `doctor LINE && run LINE`, too."""
    level = worst(findings)
    return 0 if level is Level.WARN and not strict else level.exit_code


def render(findings: Sequence[DoctorFinding], *, strict: bool = False) -> str:
    """One line for all passed checks, then the problems with their fixes: this node's first, then the other nodes'."""
    lines = [line for finding in findings for line in lines_of(finding)]
    return "\n".join([*lines, "", conclusion(findings, strict=strict)])


def lines_of(finding: DoctorFinding) -> list[str]:
    what = f"{finding.node}: {finding.what}" if finding.node else finding.what
    code = "" if finding.level is Level.PASS else f"{finding.code} "
    lines = [f"{MARKS[finding.level]:6}{printable(what):{WHAT_WIDTH}} {code}{printable(finding.why)}"]
    if finding.fix:
        lines.append(f"{'':{6 + WHAT_WIDTH}} → {printable(finding.fix)}")
    return lines


def conclusion(findings: Sequence[DoctorFinding], *, strict: bool = False) -> str:
    """`2 warnings, 1 fatal problem: …`"""
    level = worst(findings)
    if level is Level.PASS:
        return f"all well: {len(findings)} checks passed"
    nouns = {Level.FATAL: "to mend first", Level.RETRY: "to try again", Level.WARN: "to know"}
    counts = [(sum(finding.level is each for finding in findings), noun) for each, noun in nouns.items()]
    shown = ", ".join(f"{count} {noun}" for count, noun in counts if count)
    codes = sorted({finding.code for finding in findings if finding.level is level})
    exits = exit_code(findings, strict=strict)
    return f"{level.value}: {shown}; holdfast explain {codes[0]} tells more (exit code {exits})"


def as_json(findings: Sequence[DoctorFinding], *, strict: bool = False) -> dict[str, Any]:
    level = worst(findings)
    return {
        "level": level.value,
        "exit_code": exit_code(findings, strict=strict),
        "findings": msgspec.to_builtins(findings),
    }


def printable(text: str) -> str:
    """The text without control characters: texts of other nodes come from the network."""
    return "".join(character if character.isprintable() else " " for character in text)

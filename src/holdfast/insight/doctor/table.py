"""Findings for people and for programs: a table of short lines, the worst level, plain data for JSON. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.core.doctor import DoctorFinding, Level

MARKS = {Level.PASS: "ok", Level.WARN: "WARN", Level.RETRY: "RETRY", Level.FATAL: "FATAL"}
WHAT_WIDTH = 20


def worst(findings: Sequence[DoctorFinding]) -> Level:
    return max((finding.level for finding in findings), key=lambda level: level.exit_code, default=Level.PASS)


def exit_code(findings: Sequence[DoctorFinding], *, strict: bool) -> int:
    """Of `holdfast doctor`: a warning does not keep `doctor LINE && run LINE` from running, unless it is to."""
    level = worst(findings)
    return 0 if level is Level.WARN and not strict else level.exit_code


def render(findings: Sequence[DoctorFinding], *, strict: bool = False) -> str:
    """One line for what passes; problems with their fix below. This node's first, then those of the others."""
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
    return f"{level.value}: {shown}; holdfast explain {codes[0]} tells more (exit code {exit_code(findings, strict=strict)})"


def as_json(findings: Sequence[DoctorFinding], *, strict: bool = False) -> dict[str, Any]:
    level = worst(findings)
    return {
        "level": level.value,
        "exit_code": exit_code(findings, strict=strict),
        "findings": [
            {
                "code": finding.code,
                "level": finding.level.value,
                "what": finding.what,
                "why": finding.why,
                "fix": finding.fix,
                "node": finding.node,
            }
            for finding in findings
        ],
    }


def printable(text: str) -> str:
    """Others' words come from the network: nothing in them may upset a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)

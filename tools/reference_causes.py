"""Make docs/causes.md: what each verdict and each finding of the doctor means, from the tables that `holdfast explain` reads."""

from __future__ import annotations

from pathlib import Path

from holdfast.diagnosis.reference import Explanation, finding_texts, verdict_texts

PATH = Path(__file__).resolve().parent.parent / "docs" / "causes.md"

HEAD = """# What a code means, and what to do

This page is made by `make fmt` from what `holdfast explain CODE` says offline. It has the [verdicts](#verdicts) of jobs and
what [`holdfast doctor`](#holdfast-doctor) finds. Errors of the command line say all there is to say in their message; they are listed, with all exit
codes, in [errors.md](errors.md).
"""


def render() -> str:
    """The whole page."""
    verdicts, findings = section(verdict_texts()), section(finding_texts())
    return f"{HEAD}\n## Verdicts\n{verdicts}\n## `holdfast doctor`\n{findings}"


def section(codes: dict[str, Explanation]) -> str:
    return "".join(text(codes[code]) for code in sorted(codes))


def text(each: Explanation) -> str:
    name = each.name.replace("`", "")
    parts = (("Cause", each.cause), ("Evidence", each.evidence), ("What to do", each.fix))
    return (
        f"\n### {each.code}: {name}\n\n" + "\n".join(f"- **{title}.** {marked(said)}" for title, said in parts) + "\n"
    )


def marked(said: str) -> str:
    """As Markdown: what would be taken for markup is not."""
    return " ".join(said.split()).replace("<", "&lt;").replace("__", "\\_\\_").replace("*", "\\*")

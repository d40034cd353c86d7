"""What the campaign leaves: a page for readers and a JSON file with everything, and the list of what ran for
docs/promises.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.campaign import Ended, PartResult

TEXT_CHARACTERS = 300


def write(results: Sequence[PartResult], about: Mapping[str, str], folder: Path) -> Path:
    """Write both files. Returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{name_of(about, results)}.md"
    data = {"about": about, "parts": [each.to_json() for each in results]}
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    path.write_text(page(results, about))
    return path


def name_of(about: Mapping[str, str], results: Sequence[PartResult]) -> str:
    """The device's name as part of a file's name: h100-80gb-hbm3."""
    found = fact(results, "device") or about["device"]
    return re.sub(r"[^a-z0-9]+", "-", found.lower().replace("nvidia", "")).strip("-")


def fact(results: Sequence[PartResult], name: str) -> str:
    """A text that some part has noted; empty: there is none."""
    return next((n["text"] for each in results for n in each.notes if n["name"] == name and "text" in n), "")


def page(results: Sequence[PartResult], about: Mapping[str, str]) -> str:
    parts = [
        f"# {fact(results, 'device') or about['device']}, {about['date'][:10]}\n",
        f"Made by `make gpu` at commit {about['commit']}, in {about['seconds']} s. {about['installed']}\n",
        "| part | result | s | what was measured |\n|---|---|---:|---|",
    ]
    parts += [
        f"| {each.part.name}: {each.part.title} | {each.ended.value} | {each.seconds:.1f} | {_measured(each)} |"
        for each in results
    ]
    parts += (
        _promises(results) if about["device"] == "cuda" else ["\nA rehearsal on the CPU: it shows nothing of a GPU."]
    )
    for each in results:
        if each.error:
            parts.append(f"\n## {each.part.name}: the end of its output\n\n```\n{each.error.strip()}\n```")
    return "\n".join(parts) + "\n"


def _promises(results: Sequence[PartResult]) -> list[str]:
    """What ran, and what did not, in the words of docs/promises.md."""
    shows = [each for each in results if each.part.shows]
    ran = [f"- {each.part.shows}" for each in shows if each.ended is Ended.DONE]
    not_shown = [f"- {each.part.shows}: {each.ended.value}" for each in shows if each.ended is not Ended.DONE]
    head, middle = "\n## What ran, for docs/promises.md\n", "\nNot shown by this run:\n"
    return [head, *(ran or ["- nothing"]), middle, *(not_shown or ["- of these parts, nothing is missing"])]


def _measured(result: PartResult) -> str:
    return "<br>".join(map(_line, result.notes)).replace("|", "/")


def _line(note: Mapping[str, Any]) -> str:
    if "text" in note:
        return f"{note['name']}: {note['text']}"[:TEXT_CHARACTERS].replace("\n", " ")
    return f"{note['name']}: {note['value']:.4g} {note['unit']}".rstrip()

"""The labels of the public Python names: the table of docs/stability.md, and the names of docs/api.md."""

from __future__ import annotations

import re

from tools.reference_python import PATH as API

PAGE = API.with_name("stability.md")
LABELS = frozenset({"stable", "provisional"})


def labels() -> dict[str, str]:
    """The label of each name in the page's table."""
    rows = re.findall(r"^\| (.+) \| (\w+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: label for names, label in rows for name in re.findall(r"`(holdfast[\w.]+)`", names)}


def public_names() -> set[str]:
    return set(re.findall(r"^### (holdfast[\w.]+)$", API.read_text(encoding="utf-8"), re.MULTILINE))

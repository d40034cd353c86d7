"""The pages of docs/ that are made from the code, and how to make them all.

python -m tools.pages           # say which of them are not current
python -m tools.pages --write   # write them: part of `make fmt`

Each page has a module with PATH and render(); json_schemas.py has several files. tests/tidy holds the files against them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tools import (
    error_table,
    event_table,
    failure_table,
    json_schemas,
    measured_page,
    metric_table,
    reference_causes,
    reference_options,
    reference_python,
    reference_variables,
    survive_table,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES: dict[Path, Callable[[], str]] = {
    module.PATH: module.render
    for module in (
        error_table,
        event_table,
        failure_table,
        measured_page,
        metric_table,
        reference_causes,
        reference_options,
        reference_python,
        reference_variables,
        survive_table,
    )
} | json_schemas.PAGES


def stale() -> Iterator[tuple[Path, str]]:
    """Pages that are not what the code says, and what they should be."""
    for path, render in PAGES.items():
        text = render()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            yield path, text


def main() -> int:
    write = sys.argv[1:] == ["--write"]
    for path, text in list(stale()):
        print(f"{'written' if write else 'not current'}: docs/{path.relative_to(DOCS)}")
        if write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

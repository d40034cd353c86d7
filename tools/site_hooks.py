"""What MkDocs does to pages on their way into the site: examples come along, and tables lose the escapes that forges need.

Pages are written for a forge, where `../examples/x.py` is a file beside docs/. On the site examples/ lies inside.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("*.py", "*.md")
CODE = re.compile(r"(`+)(.+?)\1")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is in examples/."""
    for pattern in EXAMPLES:
        for path in sorted((ROOT / "examples").rglob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links to ../examples lead to what on_files has added; `a\\|b` in a table's code becomes `a|b`."""
    if "/" not in page.file.src_uri:
        markdown = markdown.replace("](../examples/", "](examples/")
    return "\n".join(
        CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in markdown.split("\n")
    )

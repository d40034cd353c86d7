"""What MkDocs does to pages on their way into the site: examples come along, and tables lose the escapes that forges need.

Pages are written for a forge, where `../examples/x.py` is a file beside docs/. On the site examples/ lies inside docs/.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("*.py", "*.md")
FILE_LINK = re.compile(r"\[([\w-]+\.md)\]\(\1(#[\w-]+)?\)")
CODE = re.compile(r"(`+)(.+?)\1")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is in examples/."""
    for pattern in EXAMPLES:
        for path in sorted((ROOT / "examples").rglob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Links to ../examples lead to what on_files has added; `a\\|b` in a table's code becomes `a|b`; a link that shows a
    file's name shows the page's."""

    def titled(found: re.Match[str]) -> str:
        target = files.get_file_from_path(found[1])
        title = target.page.title if target is not None and target.page is not None else None
        return f"[{title or found[1]}]({found[1]}{found[2] or ''})"

    markdown = FILE_LINK.sub(titled, markdown)
    if not page.file.src_uri.startswith("examples/"):
        markdown = markdown.replace("](../examples/", "](examples/").replace("](../../examples/", "](../examples/")
    return "\n".join(
        CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in markdown.split("\n")
    )

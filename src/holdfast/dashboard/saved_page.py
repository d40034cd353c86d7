"""The page of a run as one file, for `holdfast report --html`: it loads nothing, and works without a server.

Style, scripts and data are in the file. Its content security policy names the digests of the scripts, so that nothing
else in the file can be one.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.dashboard.job_source import ShownJob, encoded
from holdfast.runs.journal_reader import first_outcome

STATIC = Path(__file__).parent / "static"
MODULES = ("dom.js", "grid.js", "charts.js", "logs.js", "profiles.js", "app.js")
"""The page's modules in the order of their imports. They become one script, so no two define the same name."""
IMPORT_OR_EXPORT = re.compile(r'^import .* from "\./\w+\.js";\n|^export (?=class|function|const)', re.MULTILINE)


def render(folders: Sequence[Path]) -> str:
    """The file's content: the run as these folders have it."""
    source = ShownJob(str(folders[0]), folders)
    while source.read():
        pass
    end = first_outcome(folders)
    source.outcome = end[1] if end is not None else None
    # A text in the data must not end the script element that contains it.
    data = encoded({"at": time.time(), "story": source.story()}).decode().replace("<", "\\u003c")
    chart = (STATIC / "uplot" / "uPlot.iife.min.js").read_text()
    program = "".join(IMPORT_OR_EXPORT.sub("", (STATIC / name).read_text()) for name in MODULES)
    style = (STATIC / "uplot" / "uPlot.min.css").read_text() + (STATIC / "style.css").read_text()
    policy = f"default-src 'none'; style-src {digest(style)}; script-src {digest(chart)} {digest(program)}"
    body = re.search(r"<body.*</body>", (STATIC / "index.html").read_text(), re.DOTALL)
    assert body is not None
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>holdfast</title><style>{style}</style></head>\n'
        + body[0].replace("{page}", "job").replace('href="{root}./"', "").replace("</body>", "")
        + f'<script type="application/json" id="saved">{data}</script>'
        f'<script>{chart}</script><script type="module">{program}</script></body></html>\n'
    )


def digest(text: str) -> str:
    """The text's digest as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

"""Build and check a release, and print what a person does by hand.

    python -m tools.release [--machines x86_64,aarch64] [--repository https://…]

Refuses what would be published wrongly: changes that are not committed, files that name another version, a tag that exists. Uploads and
tags nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from holdfast.version import __version__
from tools.dist import ELF_MACHINES, ROOT, git

NAMES_VERSION = {
    "CHANGELOG.md": r"^## (\S+)",
    "CITATION.cff": r"^version: (\S+)$",
    "examples/Dockerfile": r"^ARG HOLDFAST=(\S+)$",
}
"""Files that name the version, and where."""
BY_HAND = """\

{version} is built and checked. What is left is for a person:

  1. Once: see whether https://pypi.org/project/holdfast is free. In April 2026 another project had this name there. If it still has it, upload to an
     index of your own, or change `name` in pyproject.toml and the lines `pip install 'holdfast[…]'` of messages and pages. The import
     and the command keep their name.
  2. {dated}
  3. git push origin HEAD && git tag -s v{version} -m "holdfast {version}" && git push origin v{version}
  4. .venv/bin/twine upload {files}
     Try it with --repository testpypi first. A file that was uploaded can never be replaced.
  5. In an empty environment: pip install holdfast=={version} && holdfast --version --verbose
     It prints the commit of the tag, {commit}. Where the repository has a page for releases: the section of CHANGELOG.md, and these files.
  6. make docs, and publish build/site.
  7. In src/holdfast/version.py, CITATION.cff, examples/Dockerfile and a new section of CHANGELOG.md: the next version."""
DATED = "CHANGELOG.md and CITATION.cff have the date of the release: {date}."
NOT_DATED = """In CHANGELOG.md write the date: ## {version} ({date}), add `date-released: {date}` to CITATION.cff, commit, and run
     make release once more: the commit is part of what is built."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release")
    parser.add_argument("--machines", default=",".join(ELF_MACHINES))
    parser.add_argument("--repository", default="", help="see python -m tools.dist --help")
    chosen = parser.parse_args()
    if found := list(reasons(ROOT)):
        for reason in found:
            print(f"tools.release: {reason}", file=sys.stderr)
        return 1
    for old in (ROOT / "dist").glob("*"):
        old.unlink()
    for command in (
        ("tools.dist", "--machines", chosen.machines, "--repository", chosen.repository),
        ("pytest", "tests/packaging", "-q"),
    ):
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False)
        if done.returncode != 0:
            return done.returncode
    date = git(ROOT, "log", "-1", "--format=%cs")
    files = " ".join(f"dist/{file.name}" for file in sorted((ROOT / "dist").iterdir()))
    if not chosen.repository:
        print(
            "No repository was named: the page of the package has no links. make release REPOSITORY=https://… adds them."
        )
    dated = (DATED if released_on(ROOT) else NOT_DATED).format(version=__version__, date=released_on(ROOT) or date)
    print(BY_HAND.format(version=__version__, dated=dated, files=files, commit=git(ROOT, "rev-parse", "HEAD")))
    return 0


def released_on(root: Path) -> str:
    """The date of this version in CHANGELOG.md; empty: it has none."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(__version__)} \((\d{{4}}-\d\d-\d\d)\)$", text, re.MULTILINE)
    return found[1] if found else ""


def reasons(root: Path) -> Iterator[str]:
    """The reasons why nothing may be released."""
    if changed := git(root, "status", "--porcelain"):
        yield f"not committed, so it would not be built: {changed.splitlines()[0].split()[-1]}"
    for name, pattern in NAMES_VERSION.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if match is None or match[1] != __version__:
            yield f"{name} names version {match[1] if match else 'none'}, and src/holdfast/version.py {__version__}"
    cited = re.search(r"^date-released: (\S+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    if (released_on(root) or "none") != (cited[1].strip("\"'") if cited else "none"):
        yield f"CHANGELOG.md has the date {released_on(root) or 'none'} and CITATION.cff {cited[1] if cited else 'none'}"
    if git(root, "tag", "--list", f"v{__version__}"):
        yield f"the tag v{__version__} exists: this version is released"


if __name__ == "__main__":
    sys.exit(main())

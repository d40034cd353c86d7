"""The documentation: it builds strictly, pages made from the code are current, and what they name is there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.limits import limit_s
from tools import failure_table, pages, reference_options, reference_variables, survive_table
from tools.named_tests import exists

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)")
TEST = re.compile(r"`(tests/[\w./]+)(?:::(\w+))?`")
BESIDE = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def prose(path: Path) -> Iterator[tuple[int, str, str]]:
    """Number, text and previous leader of each line outside of code."""
    before, in_code = "", False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line, before
        before = line


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: every page in the menu, every link and anchor leading somewhere."""
    pytest.importorskip("material", reason="MkDocs Material is not installed: pip install 'holdfast[docs]'")
    folder = tmp_path_factory.mktemp("built") / "site"
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=limit_s(100), env={"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    made = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")} <= made
    loaded = [
        f"{path.name}: {found}"
        for path in site.rglob("*.html")
        for found in re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)', path.read_text(encoding="utf-8")
        )
    ]
    assert not loaded


def test_the_search_works_from_a_disk(site: Path) -> None:
    """Browsers start no Worker for a page of a disk, and load no index: docs/iframe-worker.js and a plugin do.

    The page reads what is in the field when a key is released. `fill` presses no key, so its text may remain unread.
    """
    from tests.support.pages import browsing

    with browsing((site / "index.html").as_uri()) as page:
        field = page.locator("input.md-search__input")
        field.focus()
        page.get_by_text("Type to start searching").wait_for()  # the page listens and has loaded the index
        field.press_sequentially("witness")
        page.wait_for_selector(".md-search-result__item")
        places = page.eval_on_selector_all(".md-search-result__item a", "links => links.map(each => each.href)")
        assert any("/elastic.html" in place for place in places)
        assert [place for place in places if not place.startswith("file:")] == []
        assert page.problems == []


def test_the_menu_names_each_page_once() -> None:
    """MkDocs takes a page that is named twice without a word, and shows it under the last name."""
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.stem)
def test_a_page_made_from_the_code_is_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == pages.PAGES[path](), "run `make fmt`"


@pytest.mark.parametrize("table", [failure_table, survive_table], ids=lambda table: table.PATH.stem)
def test_every_test_in_a_table_is_there(table: ModuleType) -> None:
    assert not table.missing()


def test_a_test_that_is_not_there_is_missed() -> None:
    assert not exists("processes/test_restarts.py::test_that_nobody_wrote")
    assert not exists("scenarios/nobody_wrote.txt")
    assert exists("processes/test_restarts.py::test_all_ranks_begin_again")


def test_every_test_that_a_page_names_is_there() -> None:
    gone = []
    for path in [*DOCS.rglob("*.md"), *BESIDE]:
        for file, function in TEST.findall(path.read_text(encoding="utf-8")):
            known = (ROOT / file).exists() if not function else exists(f"{file}::{function}"[6:])
            if not known:
                gone.append(f"{path.name}: {file} {function}")
    assert not gone


def test_links_between_files_lead_somewhere() -> None:
    """Of pages outside the site, and out of docs/: the site's own are MkDocs' to check."""
    broken = [
        f"{path.name}: {target}"
        for path in [*BESIDE, *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
        for target in LINK.findall(path.read_text(encoding="utf-8"))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert not broken


def test_lists_and_tables_stand_apart() -> None:
    """After a line of text a forge shows a list, and the site more text."""
    joined = []
    for path in DOCS.rglob("*.md"):
        for number, line, before in prose(path):
            begins_list = re.match(r"(- |\d+\. )", line) and not re.match(r"(- |\d+\. |\s)", before)
            begins_table = line.startswith("|") and not before.startswith("|")
            if (begins_list or begins_table) and before and not before.startswith("#"):
                joined.append(f"{path.name}:{number}: {line[:60]}")
    assert not joined


def test_a_variable_that_nobody_explained_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(reference_variables.READ, "HOLDFAST_TOKEN")
    with pytest.raises(LookupError, match="HOLDFAST_TOKEN"):
        reference_variables.render()


def test_a_key_of_rdzv_conf_that_nobody_explained_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(reference_options.CONF_KEYS, "settle")
    with pytest.raises(LookupError, match="settle"):
        reference_options.render()

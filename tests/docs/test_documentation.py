"""The pages: links, anchors, navigation and tables against the program; the built site in a real browser."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from benchmarks import notices

import fedsolve
from fedsolve import extend, gradient, version
from tests import browser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
]
KINDS = ("tutorials", "how-to", "explanation", "reference")


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names that GitHub and the site give to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(text), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, anchor = urldefrag(link)
        target = page if not path else page.parent / path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert broken == []


def listed(page: str) -> list[str]:
    """The pages in the table of contents of a page."""
    (contents,) = re.findall(
        r"^```{toctree}\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return re.findall(r"<([\w-]+)>$", contents, flags=re.MULTILINE)


def test_every_page_is_in_the_navigation() -> None:
    assert listed("index") == ["install", *KINDS]
    below = [page for kind in KINDS for page in listed(kind)]
    assert len(below) == len(set(below))
    assert {"index", "install", *KINDS, *below} == {page.stem for page in DOCS.glob("*.md")}


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in DOCS.glob("reference-python*.md"))
    shown = set(re.findall(r"^\.\. auto\w+:: fedsolve\.(\S+)$", text, flags=re.MULTILINE))
    modules = {"__version__", "gradient", "partition", "privacy"}
    assert set(fedsolve.__all__) - modules <= shown
    assert {f"gradient.{name}" for name in gradient.__all__} <= shown
    assert {name for name in extend.__all__ if f"extend.{name}" not in shown} <= set(fedsolve.__all__)
    assert {"data.partitions", "privacy.SecureFederation", "testing.check_method"} <= shown


def test_the_page_on_compatibility_has_the_numbers_of_the_program() -> None:
    page = (DOCS / "compatibility.md").read_text()
    told = [int(number) for number in re.findall(r"^\| [a-z ]+ \| (\d+) \|", page, flags=re.MULTILINE)]
    assert told == [number for name, number in vars(version).items() if name.isupper()]
    pages = (DOCS / "formats.md").read_text()
    assert f"## Model files (version {version.MODEL})" in pages
    assert f"## Checkpoints (version {version.CHECKPOINT})" in pages
    assert f"wire version {version.MESSAGE}" in pages


def test_notices_and_citation_follow_the_project() -> None:
    page = (ROOT / "THIRD-PARTY-NOTICES.md").read_text()
    listed = {name.lower() for name in re.findall(r"^\| ([\w.-]+) \|", page, flags=re.MULTILINE)}
    for extra, requirements in notices.wanted().items():
        assert extra == "core" or f"\n## fedsolve[{extra}]\n" in page
        assert {each.name.lower() for each in requirements} - {"fedsolve"} <= listed
    # Rows of what is installed in the same version as then say the same of its licence.
    then = dict(re.findall(r"^(\| [\w.-]+ \| [\w.]+ \|)(.*)$", page, flags=re.MULTILINE))
    now = dict(re.findall(r"^(\| [\w.-]+ \| [\w.]+ \|)(.*)$", notices.notices([]), flags=re.MULTILINE))
    assert {row: now[row] for row in then.keys() & now.keys()} == {
        row: then[row] for row in then.keys() & now.keys()
    }
    assert f"\nversion: {fedsolve.__version__}\n" in (ROOT / "CITATION.cff").read_text()


class Links(HTMLParser):
    """Where a built page leads, and the names of its places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.leads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.places.add(value)
            elif name in ("href", "src") and value and tag != "use":
                self.leads.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.docs
def test_no_link_of_the_site_is_broken(site: Path) -> None:
    pages = {path: Links(path.read_text()) for path in site.glob("*.html")}
    assert len(pages) > 30
    broken = []
    for path, page in pages.items():
        for lead in page.leads:
            if re.match(r"[a-z]+:", lead):
                continue
            address, place = urldefrag(lead)
            address = address.partition("?")[0]
            target = path if not address else (path.parent / unquote(address)).resolve()
            if not target.exists() or (place and unquote(place) not in pages[target].places):
                broken.append(f"{path.name}: {lead}")
    assert broken == []
    assert "--refinement-width" in (site / "reference-parameters.html").read_text()


@pytest.mark.slow
@pytest.mark.docs
@pytest.mark.browser
@pytest.mark.skipif(browser.FOUND is None, reason=browser.MISSING)
def test_the_site_works_from_files_on_wide_and_narrow_screens(site: Path) -> None:
    with browser.Browser() as chromium:
        for name in ("index", "reference-python", "how-to-gradient", "threat-model"):
            for width, dark in ((1280, False), (1280, True), (390, False)):
                page = chromium.open(site / f"{name}.html", width=width, dark=dark)
                page.evaluate("new Promise(done => setTimeout(done, 300))")
                assert page.problems() == []
                assert {address.partition(":")[0] for address in page.requests()} <= {"file", "data", "about"}
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
                light = sum(map(int, re.findall(r"\d+", ground)[:3])) > 3 * 128
                assert light is not dark
        page = chromium.open(f"{(site / 'search.html').as_uri()}?q=landmarks")
        found = page.evaluate(
            """new Promise((done) => {
              const look = (tries) => {
                const links = [...document.querySelectorAll("#search-results li a")].map((each) => each.href);
                links.length || !tries ? done(links) : setTimeout(look, 200, tries - 1);
              };
              look(100);
            })"""
        )
        assert any(re.search(r"/formats\.html", address) for address in found), found
        assert page.problems() == []

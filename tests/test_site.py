"""The documentation as a site that browsers open from files, without a server."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


class Addresses(HTMLParser):
    """Collects the addresses that a page links to or loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attributes if name in {"href", "src"} and value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_addresses_are_those_of_files(site: Path) -> None:
    """Links name files, because a browser lists folders of the file system."""
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]  # a server's page
    assert site / "index.html" in pages
    for page in pages:
        for address in Addresses(page).found:
            path = address.partition("#")[0]
            assert not path or "://" in path or (page.parent / path).is_file(), (page, address)


def test_examples_in_docstrings_are_code(site: Path) -> None:
    pages = [page.read_text() for page in site.rglob("*.html")]
    assert any('<span class="gp">&gt;&gt;&gt; </span>' in page for page in pages)
    assert not any("<blockquote>\n<blockquote>" in page for page in pages)


def test_the_search_needs_no_server(site: Path) -> None:
    """Pages opened from files may neither fetch an index nor start a worker."""
    assert (site / "search" / "search_index.js").is_file()
    assert "javascripts/iframe-worker.js" in Addresses(site / "index.html").found

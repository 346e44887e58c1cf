"""The site of ``make docs`` has every page in its navigation, builds strictly, and fetches nothing."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from markdown_it import MarkdownIt
from tools.docs.snippets import ROOT

import attention_client
from attention_client.calls.question_calls import Questions
from attention_client.client_base import GROUPS
from attention_contract.errors import error_classes

OUTSIDE = {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"}
"""Pages of the navigation that ``docs/site_pages.py`` adds to those of ``docs/``."""
FETCHED = re.compile(
    r"""<(?:script|link|img|iframe|source|video)\b[^>]*?\s(?:src|href|srcset)=["']?((?:https?:)?//[^\s"'>]+)"""
)
"""An address that a browser fetches when it shows a page."""


def entries(item):
    """Yield the paths of a navigation."""
    if isinstance(item, str):
        yield item
    elif isinstance(item, dict):
        for below in item.values():
            yield from entries(below)
    else:
        for below in item:
            yield from entries(below)


@pytest.fixture(scope="module")
def config():
    loading = pytest.importorskip("mkdocs.config", reason="needs the extra docs")
    return loading.load_config(str(ROOT / "mkdocs.yml"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def article(page: Path) -> str:
    """Return the text of a page without its frame."""
    text = re.search(r"<article.*?</article>", page.read_text("utf-8"), re.DOTALL)[0]
    return re.sub(r"<nav.*?</nav>", "", text, flags=re.DOTALL)


def test_the_navigation_covers_every_page(config):
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    listed = list(entries(config.nav))
    assert sorted(listed) == sorted([*pages, *OUTSIDE])


def test_an_address_that_a_browser_fetches_is_found():
    assert FETCHED.findall('<a href="https://a.b/c"><script async src="https://a.b/d.js">') == ["https://a.b/d.js"]
    assert FETCHED.findall("<link rel=stylesheet href=//a.b/c.css><img src=figures/one.png>") == ["//a.b/c.css"]


@pytest.mark.slow
def test_no_page_fetches_anything_from_elsewhere(site):
    pages, sheets = sorted(site.rglob("*.html")), sorted(site.rglob("*.css"))
    assert len(pages) > 40
    assert sheets
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    found = {page.relative_to(site): FETCHED.findall(page.read_text("utf-8")) for page in pages}
    found |= {
        sheet.relative_to(site): re.findall(r"(?:url\(|@import\s)[\"']?(?:https?:)?//", sheet.read_text("utf-8"))
        for sheet in sheets
    }
    # The theme's script fetches Mermaid for a diagram, and a polyfill for browsers before 2020.
    found |= {page.relative_to(site): ["mermaid"] for page in pages if 'class="mermaid"' in page.read_text("utf-8")}
    assert {name: addresses for name, addresses in found.items() if addresses} == {}


@pytest.mark.slow
def test_markdown_reads_the_same_as_in_the_repository(site):
    """CommonMark, which the repository shows, and Python-Markdown, which the site uses, differ in lists and tables."""
    reader = MarkdownIt().enable("table")
    for source in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        page = site / ("index.html" if source.name == "README.md" else f"{source.stem}.html")
        here, there = reader.render(source.read_text("utf-8")), article(page)
        for tag in ("li", "table", "td", "pre", "h2", "h3", "img"):
            counts = [len(re.findall(rf"<{tag}[ >]", text)) for text in (here, there)]
            assert counts[0] == counts[1], f"{source.name} has {counts[0]} of {tag}, its page has {counts[1]}"


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    pages = {page.stem: article(page) for page in (site / "reference").glob("*.html")}
    text = "".join(pages.values())
    names = set(attention_client.__all__) | {one.__name__ for one in error_classes().values()}
    assert [name for name in sorted(names) if not re.search(rf'id="[\w.]+\.{name}"', text)] == []
    with attention_client.Client() as client:
        groups = {type(getattr(client, name)) for name in GROUPS}
    assert groups
    methods = {f"{group.__name__}.{name}" for group in groups for name in vars(group) if not name.startswith("_")}
    methods |= {f"Client.{name}" for name in vars(Questions) if not name.startswith("_")}
    assert [name for name in sorted(methods) if not re.search(rf'id="[\w.]+\.{name}"', text)] == []
    for name, page in pages.items():
        plain = re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL)
        assert (
            re.findall(r"``|:(?:class|meth|func|attr|mod):|>\s*::\s*<", re.sub(r"<code[^>]*></code>", "", plain)) == []
        ), name


def test_files_outside_the_documents_get_a_page_of_the_site():
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    hook = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))
    address, linked = hook["address"], hook["linked"]
    places = {name: address(ROOT / name) for name in ("README.md", "docs/api.md", "docs/reference/spec.md")}
    assert places == {"README.md": "index.md", "docs/api.md": "api.md", "docs/reference/spec.md": "reference/spec.md"}
    assert address(ROOT / "examples" / "quickstart.sh") == "source/examples/quickstart.sh.md"
    assert address(ROOT / "examples") == "source/examples/index.md"
    assert address(ROOT / "examples" / "figures" / "alignment.png") == "examples/figures/alignment.png"
    assert {path.name for path in linked(ROOT / "examples")} >= {"quickstart.py", "quickstart.sh", "demo_parts"}
    assert ROOT / "docs" / "api.md" in linked(ROOT / "README.md")
    assert re.search(hook["LINK"], "[page](https://a.b) and [part](#part)") is None


def test_an_exported_page_becomes_a_part_of_the_site(tmp_path):
    navigation = pytest.importorskip("mkdocs.structure.nav", reason="needs the extra docs")
    hook = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))
    exported = hook["on_nav"].__globals__["EXPORTED"] = tmp_path / "page"
    section = navigation.Section("Look", [SimpleNamespace(is_page=True, file=SimpleNamespace(src_uri="page.md"))])
    nav = navigation.Navigation([section], [])
    hook["on_nav"](nav=nav)
    assert len(section.children) == 1  # nothing was exported
    exported.mkdir()
    (exported / "index.html").write_text("the page")
    hook["on_nav"](nav=nav)
    hook["on_post_build"](config=SimpleNamespace(site_dir=tmp_path / "site"))
    assert (tmp_path / "site" / section.children[1].url).read_text() == "the page"

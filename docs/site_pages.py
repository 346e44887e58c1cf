"""MkDocs hook: the README as the first page, and pages for the files outside ``docs/`` that the documents link to.

A document keeps the links that work in the repository, as in ``../examples/quickstart.py``. The hook adds each such
file to the site and points the link at it. Programs become pages with their text; folders become lists. The page of the
server with recorded replies, where ``make site`` has exported it, becomes a part of the site.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation, Section

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)\s#]+")
LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml"}
"""Suffixes of files that are shown as a page of code, with the name of their language."""
EXPORTED = ROOT / "build/page"
"""The page of ``make site``."""
RECORDED = "recorded"
"""Its folder within the site."""


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the README, the other documents of the root, and every file that a page links to."""
    missing = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    for page in pages:
        missing += linked(page)
    while missing:
        path = missing.pop()
        if files.get_file_from_path(address(path)) is None:
            files.append(site_file(path, config))
            missing += linked(path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page at the addresses within the site."""
    if page.file.abs_src_path is None:
        return markdown
    source = Path(page.file.abs_src_path)
    folder = Path(address(source)).parent

    def replaced(match: re.Match[str]) -> str:
        return os.path.relpath(address(source.parent / match[0]), folder)

    return LINK.sub(replaced, markdown)


def on_nav(nav: Navigation, **_: Any) -> Navigation:
    """Link to the exported page behind the page about it."""
    sections = [item for item in nav.items if isinstance(item, Section)]
    for section in sections if EXPORTED.exists() else []:
        sources = [item.file.src_uri if item.is_page else "" for item in section.children]  # type: ignore[attr-defined]
        if "page.md" in sources:
            link = Link("The page, recorded", f"{RECORDED}/index.html")
            link.parent = section
            section.children.insert(sources.index("page.md") + 1, link)
    return nav


def on_post_build(config: Any, **_: Any) -> None:
    """Copy the exported page."""
    if EXPORTED.exists():
        shutil.copytree(EXPORTED, Path(config.site_dir, RECORDED), dirs_exist_ok=True)


def linked(page: Path) -> list[Path]:
    """Return the files and folders of the repository that a page, or a folder, leads to."""
    if page.is_dir():
        return [
            one for one in sorted(page.iterdir()) if one.suffix in {*LANGUAGES, ".md"} or (one.is_dir() and linked(one))
        ]
    if page.suffix != ".md":
        return []
    targets = [(page.parent / target).resolve() for target in LINK.findall(page.read_text("utf-8"))]
    return [target for target in targets if target.exists()]  # MkDocs reports the others


def address(path: Path) -> str:
    """Return the path within the site, before MkDocs renders it, of a file or folder of the repository."""
    name = os.path.relpath(path.resolve(), ROOT)
    if path.is_dir():
        return f"source/{name}/index.md"
    if path.suffix in LANGUAGES:
        return f"source/{name}.md"
    return "index.md" if name == "README.md" else name.removeprefix("docs/")


def site_file(path: Path, config: Any) -> File:
    """Return the file of the site for a file or folder of the repository."""
    name = path.relative_to(ROOT)
    if path.is_dir():
        folder = Path(address(path)).parent
        items = "".join(f"- [{one.name}]({os.path.relpath(address(one), folder)})\n" for one in linked(path))
        return File.generated(config, address(path), content=f"# {name}\n\n{items}")
    if path.suffix in LANGUAGES:
        code = f"# {path.name}\n\n`{name}`\n\n````{LANGUAGES[path.suffix]}\n{path.read_text('utf-8')}````\n"
        return File.generated(config, address(path), content=code)
    return File.generated(config, address(path), abs_src_path=str(path))

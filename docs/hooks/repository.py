"""Hook of MkDocs: pages that lie beside `docs/`, and files of the repository that pages link to.

README.md, CHANGELOG.md and CONTRIBUTING.md become pages of the site. A link that leads from a page to
another file of the repository leads to a copy of it below `source/`; one to a folder leads to the list of
its files. So the same Markdown reads well in the repository and on a site that is read without any network.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

#: Pages by the file of the repository that they are.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
SOURCE = "source"
_LEFT_OUT = {"__pycache__", "node_modules"}
_FENCE = re.compile(r"^(```.*?^```)$", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages that lie beside `docs/`."""
    root = _root(config)
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(root / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns a page's links out of `docs/` into links that work on the site."""
    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(lambda link: _turned(link, page, config, files), text) for text in parts[::2]]
    return "".join(parts)


def _turned(link: re.Match[str], page: Page, config: MkDocsConfig, files: Files) -> str:
    """The link as the site needs it; one that leads nowhere stays, and the strict build names it."""
    root, written = _root(config), link[2]
    if re.match(r"[a-z]+:", written):
        return link[0]
    beside = {site: name for name, site in PAGES.items()}
    here = beside.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    # As the repository has it: pages made from other files have their links from there.
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), written))
    on_site = _on_site(target, files)
    if page.file.src_uri not in beside and on_site:
        return link[0]
    if target in PAGES:
        new = PAGES[target]
    elif on_site:
        new = target.removeprefix("docs/")
    elif (root / target).exists() and not target.startswith(".."):
        new = _copied(target, config, files)
    else:
        return link[0]
    relative = posixpath.relpath(new, posixpath.dirname(page.file.src_uri) or ".")
    return f"{link[1]}{relative}{link[3] or ''}{link[4]}"


def _on_site(target: str, files: Files) -> bool:
    """Whether a path of the repository is a page, or lies beside the pages."""
    found = files.get_file_from_path(target.removeprefix("docs/")) if target.startswith("docs/") else None
    return found is not None and found.inclusion.value > InclusionLevel.EXCLUDED.value


def _copied(target: str, config: MkDocsConfig, files: Files) -> str:
    """Path on the site of a file, or of the list of a folder's files."""
    root = _root(config)
    place = root / target
    inside = sorted(place.rglob("*")) if place.is_dir() else [place]
    names = [
        path.relative_to(root).as_posix()
        for path in inside
        if path.is_file() and not path.is_symlink() and not _LEFT_OUT.intersection(path.parts)
    ]
    for name in names:
        # As text, whatever the ending: browsers then show it, and no web server takes it for a script.
        path = f"{SOURCE}/{name}.txt"
        if not files.get_file_from_path(path):
            files.append(File.generated(config, path, content=(root / name).read_bytes()))
    if names == [target]:
        return f"{SOURCE}/{target}.txt"
    listing = f"{SOURCE}/{target}/index.txt"
    if not files.get_file_from_path(listing):
        text = "\n".join(os.path.relpath(name, target) + ".txt" for name in names) + "\n"
        files.append(File.generated(config, listing, content=text))
    return listing


def _root(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent

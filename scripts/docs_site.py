"""Hooks of mkdocs: README.md is the site's first page, and what lies outside docs/ is linked to where it can be read.

The pages are written for GitHub, where links go from file to file. A site has the files in docs/ alone: a link to any
other leads to the repository, and a picture comes along.
"""

from __future__ import annotations

import posixpath
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s:]+)\)")
_HOME = "index.md"
_PICTURES = "pictures/"
"""Where pictures from outside docs/ are on the site."""
_EXAMPLES = "examples/"
"""Of docs/, and no part of the site: programs."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page, and pictures that lie elsewhere."""
    from mkdocs.structure.files import File

    root, docs = _places(config)
    pages = {docs + one.src_uri: one.content_string for one in files.documentation_pages()}
    pages["README.md"] = (root / "README.md").read_text(encoding="utf-8")
    for name in sorted(
        {one for page, text in pages.items() for one in pictures(text, page) if not one.startswith(docs)}
    ):
        files.append(File.generated(config, _PICTURES + posixpath.basename(name), content=(root / name).read_bytes()))
    files.append(File.generated(config, _HOME, content=pages["README.md"]))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Rewrite a page's links."""
    _, docs = _places(config)
    uri = page.file.src_uri
    return relinked(markdown, "README.md" if uri == _HOME else docs + uri, docs, config.repo_url or "")


def pictures(text: str, page: str) -> list[str]:
    """Return the pictures of a page of the repository, by their paths in it."""
    return [_resolved(page, link) for shown, _, link in _LINK.findall(text) if shown]


def relinked(text: str, page: str, docs: str, repository: str) -> str:
    """Return a page with links that hold on the site.

    Args:
        text: The page as it is in the repository.
        page: Its path there.
        docs: The folder that is the site, with a slash at its end.
        repository: Its address.
    """
    return _LINK.sub(partial(_relinked, page=page, docs=docs, repository=repository), text)


def _relinked(found: re.Match[str], *, page: str, docs: str, repository: str) -> str:
    shown, title, link = found.groups()
    name, hash_, anchor = link.partition("#")
    if not name:
        return found[0]
    target = _resolved(page, name)
    here = "" if page == "README.md" else posixpath.dirname(page.removeprefix(docs))
    if target.startswith(docs) and not target.startswith(docs + _EXAMPLES):
        address = posixpath.relpath(target.removeprefix(docs), here or ".")
    elif shown:
        address = posixpath.relpath(_PICTURES + posixpath.basename(target), here or ".")
    elif target == "README.md":
        address = posixpath.relpath(_HOME, here or ".")
    else:
        address = f"{repository}/blob/main/{target}"
    return f"{shown}[{title}]({address}{hash_}{anchor})"


def _resolved(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _places(config: MkDocsConfig) -> tuple[Path, str]:
    docs = Path(config.docs_dir)
    return docs.parent, f"{docs.name}/"

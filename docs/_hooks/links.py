"""Links between pages and the rest of the repository: right on GitHub as they are written, and made right for the site.

A link to a file that is a page of the site becomes a link to that page, a picture outside of docs/ is copied, and
everything else that is in the repository becomes a link to it on GitHub. What is not in the repository is left as it
is, so that mkdocs reports it.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from pages import absent_pages

log = logging.getLogger("mkdocs.hooks.links")

LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")
LIST_AFTER_TEXT = re.compile(r"^(?P<text>(?![-*+#>|<\s]|\d+\.\s|```)[^\n]+)\n(?=(?:[-*+]|\d+\.) )", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the links of a page right for the site."""
    root = Path(config.config_file_path).parent
    folder = Path(page.file.abs_src_path or config.docs_dir).parent
    absent = absent_pages(config)

    def replaced(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = os.path.relpath(folder / target, root).replace(os.sep, "/")
        if path.removeprefix("docs/") in absent:
            return match["text"]
        new = _site_target(path, anchor, page, config, files)
        return f"{match['image']}[{match['text']}]({new})" if new else match[0]

    return LINK.sub(replaced, _with_lists_apart(markdown))


def _site_target(path: str, anchor: str, page: Page, config: MkDocsConfig, files: Files) -> str | None:
    """Where a link to a path of the repository leads to from a page, or None if it is right as it is."""
    root = Path(config.config_file_path).parent
    pages = {source: uri for uri, source in config.extra["repository_pages"].items()}
    if not anchor:
        pages["README.md"] = "index.md"
    uri = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    known = files.get_file_from_path(uri) if uri else None
    if known is not None and not known.inclusion.is_excluded():
        return _relative(uri, page) + anchor
    if path.startswith("..") or not (root / path).exists():
        return None
    if Path(path).suffix in (".png", ".svg"):
        return _relative(_copied_picture(path, config, files), page)
    _check_anchor(root / path, anchor, page)
    kind = "tree" if (root / path).is_dir() else "blob"
    return f"{config.repo_url}/{kind}/main/{path}{anchor}"


def _copied_picture(path: str, config: MkDocsConfig, files: Files) -> str:
    """Make a picture outside of docs/ a file of the site."""
    uri = f"repository/{path}"
    if files.get_file_from_path(uri) is None:
        source = Path(config.config_file_path).parent / path
        files.append(File.generated(config, uri, abs_src_path=str(source)))
    return uri


def _relative(uri: str, page: Page) -> str:
    """A path inside of the site, from a page."""
    return os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent).replace(os.sep, "/")


def _check_anchor(path: Path, anchor: str, page: Page) -> None:
    """Warn of an anchor that a Markdown file on GitHub does not have; mkdocs checks those of the site."""
    if not anchor or path.suffix != ".md":
        return
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    if anchor[1:] not in {slugify(case="lower")(heading, "-") for heading in headings}:
        log.warning("%s: %s has no heading %s", page.file.src_uri, path.name, anchor)


def _with_lists_apart(markdown: str) -> str:
    """An empty line before lists that follow text at once: GitHub needs none, Python-Markdown does."""
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [LIST_AFTER_TEXT.sub(r"\g<text>\n\n", part) for part in parts[::2]]
    return "".join(parts)

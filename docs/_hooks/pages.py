"""Which pages the site has: those of docs/, files of the repository, and those that are yet to be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave pages that are yet to come out of the navigation, and say which."""
    absent = absent_pages(config)
    if absent:
        print(f"Not written yet, and left out of the navigation: {', '.join(absent)}")
    config.nav = _without(config.nav, absent)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that are pages of the site."""
    root = Path(config.config_file_path).parent
    for page, source in config.extra["repository_pages"].items():
        files.append(File.generated(config, page, abs_src_path=str(root / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> None:
    """Keep some pages out of the search."""
    if page.file.src_uri in config.extra["pages_without_search"]:
        page.meta["search"] = {"exclude": True}


def absent_pages(config: MkDocsConfig) -> list[str]:
    """Those of the pages to come that are not there."""
    return [page for page in config.extra["pages_to_come"] if not (Path(config.docs_dir) / page).is_file()]


def _without(nav: Any, absent: list[str]) -> Any:
    """A part of the navigation without some pages, and without sections that are empty then."""
    if isinstance(nav, list):
        parts = [_without(part, absent) for part in nav]
        return [part for part in parts if part]
    if isinstance(nav, dict):
        parts = {title: _without(part, absent) for title, part in nav.items()}
        return {title: part for title, part in parts.items() if part}
    return None if nav in absent else nav

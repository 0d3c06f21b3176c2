"""The README as package indexes show it: its links lead to the repository, at the version that is built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "https://github.com/vprop/vprop"
PAGES = f"{REPOSITORY}/blob"
FILES = "https://raw.githubusercontent.com/vprop/vprop"
MARKDOWN = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<path>[^)\s]+)\)")
HTML = re.compile(r'(?P<before>\b(?:src|srcset)=")(?P<path>[^"]+)')


class ReadmeMetadataHook(MetadataHookInterface):
    """Gives hatchling the description of the package."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling when it reads the project's metadata."""
        root = Path(self.root)
        found = re.search(r'__version__ = "(.+)"', (root / "src/vprop/_version.py").read_text(encoding="utf-8"))
        assert found is not None
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_full_links(text, root, f"v{found[1]}")}


def with_full_links(text: str, root: Path, tag: str) -> str:
    """The text with every path to a file of the repository as an address that works anywhere; all else stays."""

    def is_file(path: str) -> bool:
        return (root / path.partition("#")[0]).exists() and not path.startswith("#")

    def link(match: re.Match[str]) -> str:
        path = match["path"]
        if is_file(path):
            path = f"{FILES if match['picture'] else PAGES}/{tag}/{path}"
        inner = MARKDOWN.sub(link, match["text"])  # a picture that is a link
        return f"{match['picture']}[{inner}]({path})"

    def picture(match: re.Match[str]) -> str:
        return match["before"] + (f"{FILES}/{tag}/" if is_file(match["path"]) else "") + match["path"]

    return HTML.sub(picture, MARKDOWN.sub(link, text))

"""The README as package indexes show it: its links lead to the repository, at the version that is built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "https://github.com/vprop/vprop"
PAGES = f"{REPOSITORY}/blob"
FILES = "https://raw.githubusercontent.com/vprop/vprop"
# Links in Markdown (pictures begin with an exclamation mark), and pictures in HTML. Those with a scheme, and those to a
# place on the same page, stay.
MARKDOWN = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!\w+:|#)(?P<path>[^)\s]+)\)")
HTML = re.compile(r'(?P<before>\b(?:src|srcset)=")(?!\w+:)(?P<path>[^"]+)')


class ReadmeMetadataHook(MetadataHookInterface):
    """Gives hatchling the description of the package."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling when it reads the project's metadata."""
        root = Path(self.root)
        found = re.search(r'__version__ = "(.+)"', (root / "src/vprop/_version.py").read_text(encoding="utf-8"))
        assert found is not None
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_full_links(text, f"v{found[1]}")}


def with_full_links(text: str, tag: str) -> str:
    """The text with every path in the repository as an address that works anywhere."""

    def link(match: re.Match[str]) -> str:
        inner = MARKDOWN.sub(link, match["text"])  # a picture that is a link
        return f"{match['picture']}[{inner}]({FILES if match['picture'] else PAGES}/{tag}/{match['path']})"

    text = MARKDOWN.sub(link, text)
    return HTML.sub(lambda match: f"{match['before']}{FILES}/{tag}/{match['path']}", text)

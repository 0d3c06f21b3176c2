"""Parts of pages that the library itself knows: its public names, and the commands with their options."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

NAMES, COMMANDS = "<!-- the public names -->", "<!-- the commands -->"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what a page asks for."""
    if NAMES in markdown:
        markdown = markdown.replace(NAMES, "\n".join(_names(config)))
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, _commands())
    return markdown


def _names(config: MkDocsConfig) -> Iterator[str]:
    """For each page of the reference, in the order of the navigation, the names that it describes."""
    (reference,) = [part["API reference"] for part in config.nav if "API reference" in part]
    for entry in reference:
        ((title, uri),) = entry.items()
        described = re.findall(r"^::: (\S+)$", (Path(config.docs_dir) / uri).read_text(), flags=re.MULTILINE)
        if described:
            yield f"\n## {title}\n"
            yield from (f"- [`{name}`][{name}]{_first_sentence(name, config)}" for name in described)


def _first_sentence(path: str, config: MkDocsConfig) -> str:
    """What the docstring of a public name begins with. It is read, not imported: frameworks need not be there."""
    handler = config.plugins["mkdocstrings"].get_handler("python")
    docstring = handler.collect(path, handler.get_options({})).docstring
    text = " ".join(docstring.value.split("\n\n")[0].split()) if docstring else ""
    return ": " + re.split(r"(?<=[a-z)`>][.])\s", text)[0].rstrip(":") if text else ""


def _commands() -> str:
    """Every command with its arguments and options, as typer writes them down."""
    from typer.cli import app
    from typer.testing import CliRunner

    written = CliRunner().invoke(app, ["vprop.lab.cli", "utils", "docs", "--name", "vprop"], catch_exceptions=False)
    text = written.output.split("\n## ", maxsplit=1)[1]
    text = text.replace("* `--help`: Show this message and exit.\n", "")
    text = re.sub(r"\*\*Options\*\*:\s*(?=\n\*\*|\n#|\Z)", "", text)
    return f"## {html.unescape(text)}"

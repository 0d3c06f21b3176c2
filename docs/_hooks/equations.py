"""Equations as MathML, made when the site is built: browsers draw it without a script."""

from __future__ import annotations

import html
import logging
import re
import unicodedata
from contextlib import suppress

from latex2mathml.converter import convert
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.equations")

EQUATION = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[\[(](?P<tex>.*?)\\[\])]</(?P=tag)>', re.DOTALL)
STYLED = re.compile(r'<mi mathvariant="(?P<style>script|bold|bold-italic|double-struck)">(?P<letter>[^<]+)</mi>')


def on_page_content(content: str, page: Page, **_: object) -> str:
    """Replace what the Markdown extension marked as equations."""

    def drawn(match: re.Match[str]) -> str:
        tex = html.unescape(match["tex"]).strip()
        block = match["tag"] == "div"
        markup = mathml(tex, block)
        if re.search(r">\\[A-Za-z]|<mi>&amp;</mi>|<mi>&</mi>", markup):
            log.warning("%s: an equation has what cannot be drawn: %s", page.file.src_uri, tex)
        return f'<div class="equation">{markup}</div>' if block else markup

    return EQUATION.sub(drawn, content)


def mathml(tex: str, block: bool) -> str:
    """One equation."""
    known = re.sub(r"\\(begin|end)\{(aligned|split|gathered)\}", r"\\\1{align*}", tex)
    return STYLED.sub(_letter, convert(known, display="block" if block else "inline"))


def _letter(match: re.Match[str]) -> str:
    """A letter of another alphabet by its own character: browsers do not read ``mathvariant``."""
    letter = html.unescape(match["letter"])
    name = unicodedata.name(letter, "") if len(letter) == 1 else ""
    found = re.fullmatch(r"(?:LATIN|GREEK) (CAPITAL|SMALL) LETTER (.*)", name)
    if found:
        styled = " ".join([match["style"].upper().replace("-", " "), *found.groups()])
        for name in (f"MATHEMATICAL {styled}", styled):  # some, like ℒ, are older than the alphabet
            with suppress(KeyError):
                return f"<mi>{unicodedata.lookup(name)}</mi>"
    return match[0]

"""Equations as MathML, made when the site is built: browsers draw it without a script."""

from __future__ import annotations

import html
import logging
import re
import unicodedata
from contextlib import suppress
from itertools import pairwise
from xml.etree import ElementTree

from latex2mathml import exceptions
from latex2mathml.converter import convert
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.equations")

EQUATION = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[\[(](?P<tex>.*?)\\[\])]</(?P=tag)>', re.DOTALL)
MATHML = "{http://www.w3.org/1998/Math/MathML}"
LATEX_ERRORS = tuple(each for each in vars(exceptions).values() if isinstance(each, type))
ROWS = {f"{MATHML}{name}" for name in ("mrow", "mtd", "mstyle", "msqrt")}
LONG = 60  # characters of an equation in a line that may be wider than a small screen
THIN = {"width": "0.167em"}


def on_page_content(content: str, page: Page, **_: object) -> str:
    """Replace what the Markdown extension marked as equations."""

    def drawn(match: re.Match[str]) -> str:
        tex, block = html.unescape(match["tex"]).strip(), match["tag"] == "div"
        try:
            markup = mathml(tex, block)
        except (ValueError, ElementTree.ParseError, *LATEX_ERRORS) as error:
            log.warning("%s: an equation cannot be drawn (%s): %s", page.file.src_uri, error, tex)
            return match[0]
        if block:
            return f'<div class="equation">{markup}</div>'
        return f'<span class="equation">{markup}</span>' if len(tex) > LONG else markup

    return EQUATION.sub(drawn, content)


def mathml(tex: str, block: bool) -> str:
    """One equation."""
    tree = ElementTree.fromstring(convert(_known(tex), display="block" if block else "inline"))
    for row in list(tree.iter(f"{MATHML}mrow")):
        _join_letters(row)
    for element in tree.iter():
        text = element.text or ""
        if re.match(r"\\[A-Za-z]", text):
            raise ValueError(f"unknown: {text}")
        if element.tag == f"{MATHML}mi":
            _take_letter(element)
        if element.tag == f"{MATHML}mo" and text == "/":
            element.attrib |= {"lspace": "0", "rspace": "0"}
        if element.tag == f"{MATHML}mo" and re.fullmatch(r"[A-Za-z]{2,}", text):
            element.tag = f"{MATHML}mi"
    for row in [element for element in tree.iter() if element.tag in ROWS]:
        _space_functions(row)
    ElementTree.register_namespace("", MATHML.strip("{}"))
    return ElementTree.tostring(tree, encoding="unicode")


def _known(tex: str) -> str:
    """The same in commands that the converter knows, or that give brackets a size which browsers keep."""
    known = re.sub(r"\\(begin|end)\{(aligned|split|gathered)\}", r"\\\1{align*}", tex)
    known = re.sub(r"\\[bB]igg?l?(?=[(\[])", r"\\left", known)
    return re.sub(r"\\[bB]igg?r?(?=[)\]])", r"\\right", known)


def _join_letters(row: ElementTree.Element) -> None:
    """Make one name of the upright letters of ``\\mathrm{diag}``."""
    if len(row) > 1 and all(part.tag == f"{MATHML}mi" and part.get("mathvariant") == "normal" for part in row):
        name = "".join(part.text or "" for part in row)
        for part in list(row):
            row.remove(part)
        row.tag, row.text = f"{MATHML}mi", name


def _take_letter(element: ElementTree.Element) -> None:
    """Write a letter of another alphabet by its own character: browsers do not read ``mathvariant``."""
    style = element.get("mathvariant", "normal")
    name = unicodedata.name(element.text, "") if element.text and len(element.text) == 1 else ""
    found = re.fullmatch(r"(?:LATIN|GREEK) (CAPITAL|SMALL) LETTER (.*)", name)
    if style == "normal" or not found:
        return
    styled = " ".join([style.upper().replace("-", " "), *found.groups()])
    for name in (f"MATHEMATICAL {styled}", styled):  # some, like ℒ, are older than the alphabet
        with suppress(KeyError):
            element.text = unicodedata.lookup(name)
            del element.attrib["mathvariant"]
            return


def _space_functions(row: ElementTree.Element) -> None:
    """Set a function such as log apart from an argument without brackets."""
    children = list(row)
    for place, (element, following) in reversed(list(enumerate(pairwise(children)))):
        name = element if element.tag == f"{MATHML}mi" else next(iter(element), element)
        is_function = name.tag == f"{MATHML}mi" and re.fullmatch(r"[A-Za-z]{2,}", name.text or "")
        is_apart = following.tag == f"{MATHML}mspace" or (following.tag == f"{MATHML}mo" and following.text != "∇")
        if is_function and not is_apart:
            row.insert(place + 1, ElementTree.Element(f"{MATHML}mspace", THIN))

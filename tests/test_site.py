"""The documentation as a site: it builds without warnings, needs nothing from elsewhere, and has every public name."""

from __future__ import annotations

import ast
import html
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import vprop

ROOT = Path(__file__).parents[1]
PUBLIC = ["vprop", "vprop.acquisition", "vprop.baselines", "vprop.calibration", "vprop.curvature"]
PUBLIC += ["vprop.likelihood", "vprop.metrics", "vprop.optim", "vprop.posterior", "vprop.structures"]
LOADED = {"script": "src", "img": "src", "source": "srcset", "iframe": "src", "video": "src"}
LOADED_LINKS = ("stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload")


class Page(HTMLParser):
    """What a page loads, what it links to, and the places in it that can be linked to."""

    def __init__(self, path):
        super().__init__()
        self.path, self.loaded, self.links, self.anchors = path, [], [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        has = dict(attributes)
        self.anchors.update(has[key] for key in ("id", "name") if has.get(key))
        if has.get(LOADED.get(tag)):
            self.loaded.append(has[LOADED[tag]])
        if tag == "link" and set(has["rel"].split()) & set(LOADED_LINKS):
            self.loaded.append(has["href"])
        if tag == "a" and has.get("href"):
            self.links.append(has["href"])


def test_the_site(tmp_path):
    """One test, so that the site is built once, however tests are spread over processes."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    nowhere = dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9")
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | nowhere)
    assert built.returncode == 0, built.stdout + built.stderr
    site = {path.relative_to(tmp_path).as_posix(): Page(path) for path in tmp_path.rglob("*.html")}
    check_nothing_is_loaded_from_elsewhere(site, tmp_path)
    check_pages_of_the_navigation(site)
    check_links(site, tmp_path)
    check_links_into_the_repository(site)
    check_every_public_name(site)
    check_docstrings(site)
    check_arguments_of_optimizers(site)


def check_nothing_is_loaded_from_elsewhere(site, folder):
    for name, page in site.items():
        assert page.loaded, name
        for address in page.loaded:
            assert not urlsplit(address).netloc, f"{name} loads {address}"
    for style in folder.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text()), style


def check_pages_of_the_navigation(site):
    text = (ROOT / "mkdocs.yml").read_text()
    pages = re.findall(r"^ +- [^:]+: (\S+\.md)$", text, flags=re.MULTILINE)
    assert len(pages) > 40
    to_come = re.findall(r"^    - (\S+\.md)$", text, flags=re.MULTILINE)
    absent = {page for page in to_come if not (ROOT / "docs" / page).exists()}
    assert {page.removesuffix(".md") + ".html" for page in pages if page not in absent} <= set(site)


def check_links(site, folder):
    for name, page in site.items():
        if name == "404.html":  # its links begin at the server's root
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path.resolve()
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{name} links to {link}"
            if parts.fragment and target.suffix == ".html":
                anchors = site[target.relative_to(folder.resolve()).as_posix()].anchors
                assert unquote(parts.fragment) in anchors, f"{name} links to {link}"


def check_links_into_the_repository(site):
    there = {link for page in site.values() for link in page.links if "/vprop/vprop/" in link}
    assert there
    for link in there:
        path = re.fullmatch(r"https://github\.com/vprop/vprop/(?:blob|tree)/main/([^#]+)(?:#.*)?", link)
        assert path, link
        assert (ROOT / path[1]).exists(), link


def check_every_public_name(site):
    described = {anchor for name, page in site.items() if name.startswith("reference/") for anchor in page.anchors}
    modules = [importlib.import_module(name) for name in PUBLIC]
    names = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}
    elsewhere = {id(value) for name, value in names.items() if name in described}
    ours = {name for name, value in names.items() if value not in modules and name != "vprop.__version__"}
    assert not [name for name in sorted(ours - described) if id(names[name]) not in elsewhere]
    assert not set(_names_of_integrations()) - described
    plots = importlib.import_module("vprop.plots")
    assert not {f"vprop.plots.{name}" for name in vars(plots) if _is_its_own(name, plots)} - described


def _names_of_integrations():
    """Read, not imported: the frameworks take their time."""
    files = list((ROOT / "src" / "vprop" / "integrations").glob("*/__init__.py"))
    assert len(files) >= 3
    for path in files:
        (listed,) = re.findall(r"^__all__ = (\[.*?\])", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        yield from (f"vprop.integrations.{path.parent.name}.{name}" for name in ast.literal_eval(listed))


def _is_its_own(name, module):
    return not name.startswith("_") and getattr(vars(module)[name], "__module__", None) == module.__name__


def check_docstrings(site):
    """Nothing of the source's marks is left, and examples are code."""
    for name, page in site.items():
        if name.startswith("reference/"):
            text = html.unescape(re.sub(r"<[^>]+>", "", page.path.read_text()))
            left = re.search(r":(?:class|func|meth|mod|data):`|``", text)
            assert not left, (name, text[left.start() - 80 : left.end() + 80])
            assert "<blockquote>" not in page.path.read_text(), name


def check_arguments_of_optimizers(site):
    """Arguments are declared outside of the classes, so that reading the source does not find them."""
    text = site["reference/optimizers.html"].path.read_text()
    for name in ("Vario", "IVON", "VONG"):
        (part,) = re.findall(rf'<h2 id="vprop\.{name}".*?(?=<h2 id="vprop\.)', text, flags=re.DOTALL)
        words = html.unescape(re.sub(r"<[^>]+>", "", part))
        for argument, declared in inspect.signature(getattr(vprop, name)).parameters.items():
            entry = re.search(rf"^ *{argument}\n\s+\((.*?)\)\n\s+–\n", words, flags=re.MULTILINE | re.DOTALL)
            assert entry, (name, argument)
            if declared.default is not inspect.Parameter.empty and declared.default != float("inf"):
                assert re.search(rf"default:\s+{re.escape(repr(declared.default))}\s", entry[1]), (name, argument)


def test_equations_become_mathml():
    path = ROOT / "docs" / "_hooks" / "equations.py"
    spec = importlib.util.spec_from_file_location("equations", path)
    equations = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(equations)
    tex = r"\begin{aligned} \mathcal L &= \boldsymbol{\mu} + \log p \\ h &\leftarrow \hat h \end{aligned}"
    markup = equations.mathml(tex, block=True)
    assert 'display="block"' in markup
    assert "ℒ" in markup
    assert "𝝁" in markup
    assert markup.count("<mtr>") == 2
    assert "mathvariant" not in markup
    assert "<mi>log</mi><mspace" in markup
    assert "<mi>diag</mi><mspace" in equations.mathml(r"\mathrm{diag} \nabla^2 \Big(x\Big)^2", block=False)
    with pytest.raises(ValueError, match="unknown"):
        equations.mathml(r"\nosuchcommand x", block=False)

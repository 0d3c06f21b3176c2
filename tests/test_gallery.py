"""The gallery: each entry has one small picture and the script that makes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
ENTRIES = (DOCS / "gallery.md").read_text().split("\n## ")[1:]


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.splitlines()[0] for entry in ENTRIES])
def test_an_entry(entry):
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", entry)
    assert (DOCS / picture).stat().st_size < 100_000
    for target in re.findall(r"\]\(([^)]+)\)", entry):
        assert (DOCS / target).exists(), target
    (script,) = re.findall(r"^Script: .*\]\((\.\./[^)]+\.py)\)", entry, flags=re.M)
    text = (DOCS / script).read_text()
    assert "style" in text or "report" in text or "plots" in text  # it draws, in the one look


def test_every_example_that_draws_is_in_the_gallery():
    drawing = [path for path in (DOCS.parent / "examples").glob("*.py") if "--plot" in path.read_text()]
    assert len(drawing) >= 7
    gallery = "".join(ENTRIES)
    assert [path.name for path in drawing if f"../examples/{path.name}" not in gallery] == []

"""What a release rests on: one version everywhere, workflows that name what exists, links that work on an index."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import vprop

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")]
TEXTS += [*ROOT.glob("examples/*"), *WORKFLOWS, ROOT / "Makefile"]


def jobs_of(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def test_the_version_is_the_same_everywhere():
    """That of the last release; between releases the package has the next one's, and the changelog a part for it."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released, date = re.search(r"^## (\d\S+) \((\S+)\)$", changes, re.MULTILINE).groups()
    assert (citation["version"], str(citation["date-released"])) == (released, date)
    version = Version(vprop.__version__)
    assert ("\n## Unreleased\n" in changes) == version.is_devrelease
    assert version.is_devrelease or vprop.__version__ == released
    assert version >= Version(released)


def test_the_sections_of_a_release_are_there_once():
    """The changelog of a release is what stands under its heading."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.split(r"^## ", text, flags=re.MULTILINE)[1]
    sections = re.findall(r"^### (.+)$", newest, re.MULTILINE)
    assert len(sections) == len(set(sections)) > 0


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_name_what_exists(path):
    targets = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for job in jobs_of(path).values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert re.search(r"@(v\d|release/v\d)", step.get("uses", "@v0"))
            run = step.get("run", "")
            assert set(re.findall(r"\bmake ([a-z-]+)", run)) <= targets
            assert all((ROOT / name).exists() for name in re.findall(r"\b(?:src|tests)/[\w./]+", run))


def test_the_oldest_and_newest_versions_are_tested():
    """What the package says that it supports, and what the workflow runs."""
    matrix = jobs_of(ROOT / ".github" / "workflows" / "tests.yml")["test"]["strategy"]["matrix"]
    stated = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert matrix["python"] == stated
    assert PROJECT["project"]["requires-python"] == f">={stated[0]}"
    (oldest,) = (entry["pins"] for entry in matrix["include"] if entry["torch"] == "oldest")
    (least,) = (name.removeprefix("torch>=") for name in PROJECT["project"]["dependencies"] if "torch" in name)
    assert oldest.startswith(f"torch=={least}.0 ")


def test_extras_that_are_named_exist():
    named = set()
    for path in TEXTS:
        for names in re.findall(r"(?:vprop|[\"']\.)\[([a-z][a-z,]*)\]", path.read_text(encoding="utf-8")):
            named |= set(names.split(","))
    assert "lab" in named
    assert named <= set(PROJECT["project"]["optional-dependencies"])


def test_links_of_the_package_lead_to_the_repository():
    hatch_metadata = pytest.importorskip("hatch_metadata", reason="hatchling is not installed")
    files, pages = f"{hatch_metadata.FILES}/v1/", f"{hatch_metadata.PAGES}/v1/"
    text = '[![a](none.png)]({}docs/guide.md#b) [c](https://d.e) [f](#g) `m[0](x)` <img src="{}docs/demo">'
    text, expected = text.format("", ""), text.format(pages, files)
    assert hatch_metadata.with_full_links(text, ROOT, "v1") == expected
    readme = hatch_metadata.with_full_links((ROOT / "README.md").read_text(encoding="utf-8"), ROOT, "v1")
    assert re.findall(r"\]\((?!https?://|#)\S*/\S*\)", readme) == []
    assert PROJECT["project"]["urls"]["Homepage"] == hatch_metadata.REPOSITORY

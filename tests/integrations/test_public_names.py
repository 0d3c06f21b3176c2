"""Integrations are written against public names, so that whoever writes another one can do what they do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vprop.integrations

FOLDER = Path(vprop.integrations.__file__).parent
SOURCES = sorted(FOLDER.rglob("*.py"))

OF_THE_FRAMEWORKS = {
    # Lightning's Trainer says these two nowhere else.
    ("lightning/callback.py", "trainer.fit_loop._skip_backward"),
    ("lightning/callback.py", "trainer.fit_loop.epoch_loop._batches_that_stepped"),
    # The check of weights that scikit-learn's own estimators use, and recommends to others.
    ("sklearn/_data.py", "sklearn.utils.validation._check_sample_weight"),
}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Attributes with a leading underscore of anything but self and cls, and private imports from elsewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()"):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("vprop.integrations"):
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                if any(is_private(part) for part in name.split(".")):
                    yield name
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if any(is_private(p) for p in alias.name.split(".")))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            owner, name = ast.unparse(node.args[0]), ast.unparse(node.args[1]).strip("'")
            if owner != "self" and is_private(name):
                yield f"{owner}.{name}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_no_private_name_of_another_is_used(path):
    place = path.relative_to(FOLDER).as_posix()
    found = {(place, name) for name in private_names(ast.parse(path.read_text(encoding="utf-8")))}
    assert found - OF_THE_FRAMEWORKS == set()


def test_the_exceptions_are_still_needed():
    found = {
        (path.relative_to(FOLDER).as_posix(), name)
        for path in SOURCES
        for name in private_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found >= OF_THE_FRAMEWORKS


@pytest.mark.parametrize(
    "source",
    [
        "optimizer._marginals()",
        "self.optimizer._ledger",
        "from vprop.optim._hooks import Attachment",
        "from vprop.optim import _hooks",
        "import vprop.optim._hooks",
        "getattr(posterior, '_draw')",
    ],
)
def test_what_counts_as_private(source):
    assert len(list(private_names(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    ["self._scores", "super()._check()", "from vprop.integrations._scores import Scores", "tags.__sklearn_tags__()"],
)
def test_what_does_not(source):
    assert list(private_names(ast.parse(source))) == []

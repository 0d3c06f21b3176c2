"""Made-up results, and the report of them."""

from __future__ import annotations

import pytest

from tests.lab.report.made_up import (
    make_results,
)
from vprop.lab.report import write_report


@pytest.fixture
def results():
    return make_results()


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """The whole report, written once: drawing takes some seconds."""
    return write_report(make_results(), tmp_path_factory.mktemp("report") / "new")

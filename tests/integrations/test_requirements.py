"""Missing and old frameworks get an error that says what to install."""

from __future__ import annotations

from importlib import metadata

import pytest

from vprop.integrations._requirements import require


def test_a_framework_that_is_there_is_accepted() -> None:
    require("torch", "2.6")


def test_a_missing_framework_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ImportError, match=r"needs no-such-framework >= 1\.0, .*pip install 'no-such-framework>=1\.0'"):
        require("no-such-framework", "1.0")


@pytest.mark.parametrize(("installed", "too_old"), [("1.9", True), ("2.2", False), ("2.10.1", False), ("2.2rc1", True)])
def test_an_old_framework_is_named_with_both_versions(monkeypatch, installed, too_old) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: installed)
    if too_old:
        with pytest.raises(ImportError, match=rf"needs lightning >= 2\.2, but version {installed} .*'lightning>=2\.2'"):
            require("lightning", "2.2")
    else:
        require("lightning", "2.2")

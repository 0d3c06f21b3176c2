"""The report: from dictionaries to a page."""

from __future__ import annotations

import json
import math

import pytest

from tests.lab.report.made_up import (
    CURVES,
    NASTY,
    PANELS,
    Elements,
    make_results,
    method,
    rendered,
)
from vprop.lab.report import ReportError, curves, ranges, write_report
from vprop.lab.report.style import Styles

# -- files -----------------------------------------------------------------------------------------------------


def test_page_and_static_figures_are_written(written):
    assert written.parts[-3:] == ("new", "report", "index.html")
    links = {attrs["href"] for tag, attrs in Elements(rendered(make_results())).tags if tag == "a"}
    for name in [*PANELS, "explore", "memory"]:
        png, pdf = (written.parent / "figures" / f"{name}.{ending}" for ending in ("png", "pdf"))
        assert png.read_bytes().startswith(b"\x89PNG")
        assert pdf.read_bytes().startswith(b"%PDF")
        assert min(png.stat().st_size, pdf.stat().st_size) > 5000
        assert {f"figures/{name}.png", f"figures/{name}.pdf"} <= links


def test_nothing_is_loaded_from_a_network(written):
    elements = Elements(written.read_text())
    for tag, attrs in elements.tags:
        for key in ("src", "href", "srcset", "data", "action", "poster"):
            value = attrs.get(key) or ""
            assert value.startswith("data:") or "//" not in value, (tag, attrs)
    # the browser is told to refuse, whatever a script may try
    assert any("default-src 'none'" in (attrs.get("content") or "") for tag, attrs in elements.tags if tag == "meta")


def test_the_same_results_give_the_same_files(written, tmp_path):
    again = write_report(make_results(), tmp_path)
    files = sorted(path.relative_to(again.parent) for path in again.parent.rglob("*.*"))
    assert len(files) == 1 + 2 * 4 + 2  # the page, four figures as PNG and PDF, and the demo's two
    for file in files:
        assert (again.parent / file).read_bytes() == (written.parent / file).read_bytes(), file


def test_text_is_escaped(results):
    results["logreg"]["panels"][0]["methods"][0]["label"] = NASTY
    html = rendered(results)
    assert "<script>alert" not in html
    elements = Elements(html)
    assert elements.text.count(NASTY) > 3
    assert 'gap < "5"' in elements.text
    assert [tag for tag, _ in elements.tags].count("script") == 2


def test_the_page_is_small_and_holds_its_pictures(written):
    """It weighed 4.9 MB with a library for its figures; four of the figures inside are pictures."""
    html = written.read_text()
    assert len(html.encode()) < 400_000
    assert html.count("data:image/png;base64,") == 4
    assert 'src="figures/' not in html.replace("<noscript>", "\0<noscript>").split("\0")[0]


def test_the_claims_and_the_demo_in_words(results):
    words = Elements(rendered(results)).text
    for part in ("1 of 2 comparisons", "not measured", "Better probabilities: log-loss 0.100 instead of 0.200", "1 is"):
        assert part in words, part


def test_a_figure_with_many_methods_has_a_second_one(results, tmp_path):
    names = ["cvi-10", "vprop-0", "vprop-1"]
    panel = results["logreg"]["panels"][0]
    panel["methods"] += [method(name, name, "paper", 1.0) for name in names]
    shown = curves.figure(panel, Styles(results))["methods"]
    assert [one["name"] for one in shown if one["visible"]] == ["rmsprop", "bbvi", *names[1:], "vprop-2", names[0]]
    written = write_report({"logreg": results["logreg"] | {"panels": [panel]}}, tmp_path)
    assert {path.stem for path in written.parent.rglob("*.png")} == {PANELS[0], f"{PANELS[0]}-all"}
    assert f'href="figures/{PANELS[0]}-all.png"' in written.read_text()


@pytest.mark.parametrize("names", [["logreg"], ["explore"], ["memory"], ["claims"], ["memory", "claims"]])
def test_any_subset_will_do(results, names):
    html = rendered({name: results[name] for name in names})
    assert all(f'id="{name}"' in html for name in names)
    assert ('id="settings"' in html) == (names != ["claims"])


def test_infinities_are_gaps(results):
    results["logreg"]["panels"][0]["methods"][0]["elbo"]["mean"][-2:] = [-math.inf, math.nan]
    data = rendered(results).split('id="report-data">')[1].split("</script>")[0]
    shown = next(m for m in json.loads(data)[PANELS[0]]["methods"] if m["name"] == "vprop-2")
    assert shown["elbo"]["mean"][-2:] == [None, None]


def test_the_table_behind_a_panel(results):
    text = Elements(rendered(results)).text
    for part in ("lr = 0.1, β₂ = 0.9", "4 tried", "training ELBO", "diverged", "−630.0 ± 3.0", "MC 0.25"):
        assert part in text, part


# -- errors ----------------------------------------------------------------------------------------------------


def drop(*path):
    def change(results):
        for key in path[:-1]:
            results = results[key]
        del results[path[-1]]

    return change


def put(value, *path):
    def change(results):
        for key in path[:-1]:
            results = results[key]
        results[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            drop("logreg", "panels"),
            r"^Result 'logreg' is not one of this version .* 'panels'.* reproduce logreg` again",
        ),
        (drop("logreg", "panels", 0, "methods", 2, "passes"), r"'logreg' .*KeyError: 'passes'"),
        (drop("explore", "surface", "y"), r"^Result 'explore' .*KeyError: 'y'"),
        (drop("memory", "rows", 1, "tensors"), r"^Result 'memory' .*KeyError: 'tensors'"),
        (drop("demo", "digits"), r"^Result 'demo' .*KeyError: 'digits'.* `vprop demo` again"),
        (put("three", "memory", "rows", 0, "bytes_per_parameter"), r"^Result 'memory' .*TypeError"),
        (put("mine", "logreg", "panels", 0, "methods", 0, "group"), r"^Result 'logreg' .*KeyError: 'mine'"),
    ],
)
def test_an_error_names_what_is_wrong(results, tmp_path, change, message):
    change(results)
    with pytest.raises(ReportError, match=message):
        write_report(results, tmp_path)
    assert not list(tmp_path.rglob("index.html"))


def test_no_results_is_an_error(tmp_path):
    with pytest.raises(ReportError, match="nothing to report"):
        write_report({}, tmp_path)


# -- ranges and styles -----------------------------------------------------------------------------------------


def test_a_diverging_curve_does_not_squash_the_others():
    good = [-1000.0, -800.0, -700.0, -650.0, -640.0, -635.0, -632.0, -631.0]
    slow = [-1000.0, -980.0, -960.0, -950.0, -945.0, -942.0, -941.0, -940.0]
    wild = [-1000.0, -900.0, -1e4, -1e5, -1e6, -1e7, -1e8, -1e9]
    low, high = ranges.limits([good, slow, wild], [-613.4], higher_is_better=True)
    assert -1100 < low < -940
    assert -613.4 < high < -560
    mirrored = ranges.limits([[-v for v in c] for c in (good, slow, wild)], [613.4], higher_is_better=False)
    assert mirrored == pytest.approx((-high, -low))
    low, high = ranges.distance_limits([good, slow, wild], -613.4)
    assert 5 < low < 631 - 613.4
    assert 300 < high < 1000


@pytest.mark.parametrize("curves", [[], [[]], [[None, None]]])
def test_ranges_without_any_values(curves):
    assert ranges.limits(curves, [], higher_is_better=True) is None
    assert ranges.distance_limits(curves, 0.0) is None
    low, high = ranges.limits(curves, [5.0], higher_is_better=True)
    assert low < 5 < high


def test_a_method_looks_the_same_everywhere(results):
    styles = Styles(results)
    methods = results["logreg"]["panels"][0]["methods"]
    assert [method["name"] for method in styles.sort(methods)] == CURVES
    assert styles.of("Vprop-2") == styles.of("vprop-2")  # by label, as in the explore experiment
    assert styles.color("Vprop-2, centred") == styles.of("vprop-2-centered").color
    assert len({styles.of(name).color for name in CURVES}) == len(CURVES)
    assert styles.of("vprop-2-centered").dash != "solid"
    assert styles.of("vogn").width < styles.of("vprop-2").width

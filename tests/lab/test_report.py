"""The report: from dictionaries to a page that a real browser shows without a network."""

from __future__ import annotations

import json
import math
import shutil
from html.parser import HTMLParser

import pytest

from vprop.lab.report import ReportError, page, ranges, write_report
from vprop.lab.report.schema import without_infinities
from vprop.lab.report.style import Styles

NASTY = "</script><script>alert('x')</script> & \"quotes\" $title"
ENVIRONMENT = {"vprop": "0.0", "torch": "2.6", "cuda": None}
PASSES = [0, 1, 2, 5, 10, 20, 50, 100]
EXACT = -600.0
CURVES = ["rmsprop", "bbvi", "vprop-2", "vprop-2-centered", "vogn"]  # the order of the legend
PANELS = ["logreg-toy-full", "logreg-toy-8"]


def method(name, label, group, gap, *, elbo=True, diverges=False):
    mean = [EXACT - gap - 500 * math.exp(-passes / 5) for passes in PASSES]
    log_loss = [0.3 + 0.4 * math.exp(-passes / 5) for passes in PASSES]
    if diverges:
        mean[4:] = [-1e5, -1e9, None, None]
        log_loss[4:] = [1e3, 1e6, None, None]
    spread = [None if value is None else 3.0 for value in mean]
    return {
        "name": name,
        "label": label,
        "group": group,
        "samples": 2,
        "grid": [
            {"lr": lr, "beta2": b, "score": None if lr == 1.0 else -620.0 - b} for lr in (0.1, 1.0) for b in (0.9, 0.99)
        ],
        "chosen": {"lr": 0.1, "beta2": 0.9},
        "score_name": "training ELBO",
        "seeds": [0, 1, 2],
        "passes": PASSES,
        "paper_passes": [passes / 2 for passes in PASSES],
        "elbo": {"mean": mean, "std": spread, "standard_error": [0.25] * len(PASSES)} if elbo else None,
        "log_loss": {"mean": log_loss, "std": [0.01] * len(PASSES)},
        "seconds": 1.5,
    }


def panel(identifier, batch, lines):
    return {
        "id": identifier,
        "title": f"toy, {batch} <batch>",
        "data": "toy",
        "batch": batch,
        "num_data": 1000,
        "num_parameters": 10,
        "prior_precision": 2.5,
        "lines": lines,
        "methods": [
            method("vprop-2", "Vprop-2", "paper", 30.0),
            method("vogn", "VOGN <b>&</b>", "extra", 5.0),
            method("vprop-2-centered", "Vprop-2, centred", "ours", 2.0),
            method("bbvi", "BBVI", "paper", 100.0, diverges=True),
            method("rmsprop", "RMSprop", "paper", 0.0, elbo=False),
        ],
    }


def header(name, title):
    settings = {"seeds": [0, 1, 2], "quick": True, "nasty": NASTY}
    common = {"experiment": name, "title": title, "description": f"What {title} shows: a < b.", "notes": [NASTY]}
    return common | {"environment": dict(ENVIRONMENT), "settings": settings}


def make_results():
    lines = [
        {"label": "exact VI, diagonal", "metric": "elbo", "value": EXACT},
        {"label": "exact VI, diagonal", "metric": "log_loss", "value": 0.29},
    ]
    axis = [-2.0, -1.0, 0.0, 1.0, 2.0]
    tensors = "mean & <variance>"
    return {
        "logreg": header("logreg", "Logistic regression")
        | {"panels": [panel(PANELS[0], "full", lines), panel(PANELS[1], 8, [])]},
        "explore": header("explore", "Exploration")
        | {
            "surface": {"x": axis, "y": axis, "value": [[x * x + y * y for x in axis] for y in axis]},
            "minima": [
                {"x": 0, "y": 0, "value": 0.0, "label": "global minimum"},
                {"x": 1, "y": 1, "value": 2.0, "label": "near minimum"},
            ],
            "start": [-2, -2],
            "trajectories": [
                {"label": "Vprop-2", "points": [[-2, -2], [-1, -1], [0, 0]], "success": True},
                {"label": "Vprop-2", "points": [[-2, -2], [0, -1], [1, 1]], "success": False},
                {"label": "Newton", "points": [[-2, -2], [1, 1]], "success": False},
            ],
            "success": [
                {"label": "Newton", "rate": 0.0, "low": 0.0, "high": 0.1, "seeds": 20},
                {"label": "Vprop-2", "rate": 0.5, "low": 0.3, "high": 0.7, "seeds": 20},
            ],
        },
        "memory": header("memory", "Memory")
        | {
            "rows": [
                {"label": "RMSprop", "bytes_per_parameter": 4.0, "tensors": tensors, "group": "paper"},
                {"label": "Vprop-2, centred", "bytes_per_parameter": 8.0, "tensors": tensors, "group": "ours"},
            ]
        },
        "claims": {
            "claims": [
                {"id": "1", "sentence": NASTY, "verdict": "holds", "measured": "a < b & c", "rule": 'gap < "5"'},
                {"id": "2", "sentence": "It is fast.", "verdict": "not measured", "measured": "", "rule": ""},
            ]
        },
    }


@pytest.fixture
def results():
    return make_results()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The whole report, written once: drawing takes some seconds."""
    return write_report(make_results(), tmp_path_factory.mktemp("report") / "new")


def rendered(results):
    """The page alone, without plotly and static figures."""
    return page.render(without_infinities(results), Styles(results), plotly_js="")


class Elements(HTMLParser):
    """Every start tag of a page, and its text outside scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self._open = [], "", ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data):
        if self._open not in ("script", "style"):
            self.text += data


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
            assert "//" not in (attrs.get(key) or ""), (tag, attrs)
    # the browser is told to refuse, whatever a script may try
    assert any("default-src 'none'" in (attrs.get("content") or "") for tag, attrs in elements.tags if tag == "meta")


def test_the_same_results_give_the_same_files(written, tmp_path):
    again = write_report(make_results(), tmp_path)
    files = sorted(path.relative_to(again.parent) for path in again.parent.rglob("*.*"))
    assert len(files) == 1 + 2 * 4
    for file in files:
        assert (again.parent / file).read_bytes() == (written.parent / file).read_bytes(), file


def test_text_is_escaped(results):
    results["logreg"]["panels"][0]["methods"][0]["label"] = NASTY
    html = rendered(results)
    assert "<script>alert" not in html
    elements = Elements(html)
    assert elements.text.count(NASTY) > 3
    assert 'gap < "5"' in elements.text
    assert [tag for tag, _ in elements.tags].count("script") == 3


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


# -- in a browser ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    chromedriver = shutil.which("chromedriver")
    if not browser or not chromedriver:
        pytest.skip("no Chromium or Chrome with its chromedriver on this machine")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", "disable-dev-shm-usage", "window-size=1400,1000",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    yield driver
    driver.quit()


@pytest.fixture
def shown(driver, written):
    """The report, loaded and drawn; afterwards the console must be clean."""
    driver.get(written.as_uri())
    wait(driver, "return document.documentElement.dataset.ready === 'true'")
    yield driver
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


def wait(driver, condition, *arguments):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 20, poll_frequency=0.05).until(lambda _: driver.execute_script(condition, *arguments))


def ask(driver, figure, expression):
    """Evaluate JavaScript with ``gd`` as a figure's element."""
    script = f"const gd = document.querySelector('[data-figure=\"{figure}\"]'); return {expression};"
    return driver.execute_script(script)


def press(driver, figure, key, value):
    driver.find_element("css selector", f"#panel-{figure} button[data-key='{key}'][data-value='{value}']").click()


def line(driver, figure, name, metric, part):
    found = f"gd.data.find(t => t.meta.method === '{name}' && t.meta.metric === '{metric}' && t.meta.role === 'line')"
    return ask(driver, figure, f"{found}.{part}")


def visibility(driver, figure, name):
    return ask(driver, figure, f"gd.data.filter(t => t.meta.method === '{name}').map(t => t.visible)")


def test_every_figure_has_its_curves_and_nothing_is_fetched(shown):
    for figure in PANELS:
        traces = ask(shown, figure, "gd.data.map(t => [t.meta.method, t.meta.metric, t.meta.role])")
        metrics = {name: ("log_loss",) if name == "rmsprop" else ("elbo", "log_loss") for name in CURVES}
        assert traces == [[n, metric, role] for n in CURVES for metric in metrics[n] for role in ("band", "line")]
        assert ask(shown, figure, "gd.querySelectorAll('.legend .traces').length") == len(CURVES)
        assert ask(shown, figure, "gd.querySelectorAll('.js-line').length") > 0
    images = "return [...document.querySelectorAll('.panel > img')].map(image => image.naturalWidth > 0)"
    assert shown.execute_script(images) == [True, True]  # the static figures of explore and memory
    fetched = shown.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in fetched if not name.startswith(("file:", "data:", "blob:"))] == []


def test_how_a_panel_opens(shown):
    figure = PANELS[0]
    names = ask(shown, figure, "[...gd.querySelectorAll('.legend .traces')].map(item => item.textContent)")
    assert names == ["RMSprop", "BBVI", "Vprop-2", "Vprop-2, centred (ours)", "VOGN <b>&</b>"]
    assert set(visibility(shown, figure, "vogn")) == {"legendonly"}
    assert set(visibility(shown, figure, "vprop-2")) == {True}
    assert line(shown, figure, "bbvi", "elbo", "y")[-2:] == [None, None]
    low, high = ask(shown, figure, "gd.layout.yaxis.range")
    assert -1500 < low < -700
    assert EXACT < high < -500
    shapes = ask(shown, figure, "gd.layout.shapes.map(s => [s.yref, s.y0, s.line.dash, s.label.text])")
    assert shapes == [["y", EXACT, "dash", "exact VI, diagonal"], ["y2", 0.29, "dash", "exact VI, diagonal"]]
    assert ask(shown, PANELS[1], "gd.closest('.panel').querySelectorAll('[data-key=y]').length") == 0  # no exact line


def test_the_legend_hides_a_method_in_both_plots(shown):
    from selenium.webdriver.common.by import By

    figure = PANELS[0]
    plot = shown.find_element("css selector", f"[data-figure='{figure}']")
    shown.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    for item in plot.find_elements(By.CSS_SELECTOR, ".legend .traces"):
        if item.text == "Vprop-2":
            item.find_element(By.CSS_SELECTOR, ".legendtoggle").click()
    hidden = "return arguments[0].data.find(t => t.meta.method === 'vprop-2').visible === 'legendonly'"
    wait(shown, hidden, plot)
    assert visibility(shown, figure, "vprop-2") == ["legendonly"] * 4  # line and band, left and right
    assert visibility(shown, figure, "vprop-2-centered") == [True] * 4
    press(shown, figure, "x", "linear")  # and it stays hidden
    assert visibility(shown, figure, "vprop-2") == ["legendonly"] * 4


def test_the_buttons(shown):
    figure = PANELS[0]
    axes = "[gd._fullLayout.xaxis.type, gd._fullLayout.xaxis2.type, gd._fullLayout.yaxis.type]"
    assert ask(shown, figure, axes) == ["log", "log", "linear"]
    press(shown, figure, "x", "linear")
    assert ask(shown, figure, axes) == ["linear", "linear", "linear"]

    assert line(shown, figure, "vprop-2", "log_loss", "x") == PASSES
    press(shown, figure, "passes", "paper")
    assert line(shown, figure, "vprop-2", "log_loss", "x") == [passes / 2 for passes in PASSES]
    assert "as in the paper" in ask(shown, figure, "gd.layout.xaxis.title.text")
    press(shown, figure, "passes", "fair")
    assert line(shown, figure, "vprop-2", "elbo", "x") == PASSES

    before, log_loss = (line(shown, figure, "vprop-2", metric, "y") for metric in ("elbo", "log_loss"))
    press(shown, figure, "y", "distance-0")
    assert ask(shown, figure, axes) == ["linear", "linear", "log"]
    assert line(shown, figure, "vprop-2", "elbo", "y") == pytest.approx([EXACT - value for value in before])
    assert line(shown, figure, "vprop-2", "log_loss", "y") == log_loss
    low, high = ask(shown, figure, "gd.layout.yaxis.range")
    assert low < math.log10(2.0) < math.log10(530) < high
    press(shown, figure, "y", "elbo")
    assert line(shown, figure, "vprop-2", "elbo", "y") == before
    pressed = shown.find_elements("css selector", f"#panel-{figure} button[aria-pressed='true']")
    assert [button.text for button in pressed] == ["fair", "linear", "ELBO"]


def test_a_band_is_one_standard_deviation_and_keeps_gaps(shown):
    find = "gd.data.find(t => t.meta.method === '{}' && t.meta.metric === 'elbo' && t.meta.role === 'band')"
    band, x = (ask(shown, PANELS[0], find.format("vprop-2") + part) for part in (".y", ".x"))
    mean = line(shown, PANELS[0], "vprop-2", "elbo", "y")[1:]  # a log axis has no place for zero passes
    assert x == PASSES[1:] + PASSES[:0:-1]
    assert band == pytest.approx([value + 3 for value in mean] + [value - 3 for value in mean[::-1]])
    assert len(ask(shown, PANELS[0], find.format("bbvi") + ".x")) == 2 * 5


def test_a_narrow_screen(shown):
    try:
        wide = ask(shown, PANELS[0], "gd._fullLayout.xaxis.domain")
        shown.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        wait(shown, "return document.querySelector('.plot')._fullLayout.width < 420")
        shown.execute_script("document.querySelectorAll('details').forEach(part => { part.open = true; })")
        width, visible = shown.execute_script(
            "const root = document.documentElement; return [root.scrollWidth, root.clientWidth];"
        )
        assert visible <= 420
        assert width <= visible
        assert wide[1] < 0.5
        assert ask(shown, PANELS[0], "gd._fullLayout.xaxis.domain") == [0, 1]  # one above the other
        inside = "gd.clientHeight >= gd.querySelector('.svg-container').getBoundingClientRect().height"
        assert all(ask(shown, figure, inside) for figure in PANELS)
    finally:
        shown.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

"""The report: from dictionaries to a page that a real browser shows without a network."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser

import pytest

from vprop.lab.report import ReportError, curves, page, ranges, write_report
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


def demo():
    """What `vprop demo` writes, in miniature."""
    diagram = {"confidence": [0.5, 0.9], "accuracy": [0.4, 0.9], "share": [0.2, 0.8]}
    scores = {"accuracy": 0.9, "log_loss": 0.2, "expected_calibration_error": 0.02, "mean_confidence_on_noise": 0.8}
    scores["reliability"] = diagram
    grid = [-1.0, 0.0, 1.0]
    regression = {"grid": grid, "mean": grid, "truth": grid, "x": [0.0], "y": [0.0], "networks": 1}
    return {
        "regression": regression | {"epistemic_std": [1.0, 0.1, 1.0], "total_std": [1.1, 0.2, 1.1]},
        "digits": {"test": 10, "splits": 1, "methods": {"Adam": scores, "Vario": scores | {"log_loss": 0.1}}},
    }


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
        "demo": demo(),
        "claims": {
            "claims": [
                {
                    "id": "1",
                    "sentence": NASTY,
                    "verdict": "holds in part",
                    "share": "1 of 2 comparisons",
                    "measured": "a < b & c",
                    "rule": 'gap < "5"',
                    "checks": [{"text": "here", "holds": True}, {"text": "there", "holds": False}],
                },
                {
                    "id": "2",
                    "sentence": "It is fast.",
                    "verdict": "not measured",
                    "share": "not measured",
                    "measured": "",
                    "rule": "",
                },
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
    """The page alone, without static figures."""
    return page.render(without_infinities(results), Styles(results), pictures={})


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


def line(driver, figure, name, metric, part="y"):
    """One number of each point of a curve, as it is shown."""
    series = f"gd.drawn.{metric}.series.find(one => one.method === '{name}')"
    return ask(driver, figure, f"{series}.points.map(point => point && point.{part})")


def drawn(driver, figure, metric):
    """The methods with a line in a chart."""
    lines = f"gd.querySelectorAll('[data-metric={metric}] .series:has(> .line)')"
    return ask(driver, figure, f"[...{lines}].map(one => one.dataset.method)")


def pixels(driver, figure, metric, name, role):
    """The corners of a path, in data: what is drawn, read back through the axes."""
    path = ask(
        driver,
        figure,
        f"gd.querySelector('[data-metric={metric}] [data-method=\"{name}\"] .{role}').attributes.d.value",
    )
    corners = [[float(part) for part in corner.split(",")] for corner in path.strip("MZ").split("L")]
    back = f"arguments[0].map(([x, y]) => [gd.drawn.{metric}.x.back(x), gd.drawn.{metric}.y.back(y)])"
    script = f"const gd = document.querySelector('[data-figure=\"{figure}\"]'); return {back};"
    return driver.execute_script(script, corners)


def test_every_figure_has_its_curves_and_nothing_is_fetched(shown):
    opening = [name for name in CURVES if name != "vogn"]  # an extra
    for figure in PANELS:
        assert drawn(shown, figure, "elbo") == [name for name in opening if name != "rmsprop"]  # which has no ELBO
        assert drawn(shown, figure, "log_loss") == opening
        names = ask(
            shown, figure, "[...gd.querySelectorAll('[data-metric=log_loss] .name text')].map(t => t.textContent)"
        )
        assert sorted(names) == ["BBVI", "RMSprop", "Vprop-2", "Vprop-2, centred (ours)"]  # at the lines
    images = "return [...document.querySelectorAll('.panel img')].map(image => image.naturalWidth > 0)"
    assert shown.execute_script(images) == [True] * 4  # the demo's, explore and memory
    fetched = shown.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in fetched if not name.startswith(("data:", "blob:"))] == []


def test_how_a_panel_opens(shown):
    figure = PANELS[0]
    items = "[...gd.querySelectorAll('.legend button')].map(item => [item.textContent, item.ariaPressed])"
    names = ["RMSprop", "BBVI", "Vprop-2", "Vprop-2, centred (ours)"]
    assert ask(shown, figure, items) == [*([name, "true"] for name in names), ["VOGN <b>&</b>", "false"]]
    assert line(shown, figure, "bbvi", "elbo")[-2:] == [None, None]
    assert ask(shown, figure, "gd.querySelectorAll('[data-metric=elbo] [data-method=bbvi] .cross').length") == 1
    low, high = ask(shown, figure, "gd.drawn.elbo.y.domain")
    assert -1500 < low < -700
    assert EXACT < high < -500
    levels = "[...gd.querySelectorAll('.level-name')].map(text => text.textContent)"
    assert ask(shown, figure, levels) == ["exact VI, diagonal"] * 2
    at = ask(
        shown, figure, "gd.drawn.elbo.y.back(Number(gd.querySelector('[data-metric=elbo] .level').attributes.y1.value))"
    )
    assert at == pytest.approx(EXACT)
    assert ask(shown, PANELS[1], "gd.closest('.panel').querySelectorAll('[data-key=y]').length") == 0  # no exact line


def test_the_legend_hides_a_method_in_both_charts(shown):
    from selenium.webdriver.common.action_chains import ActionChains

    figure = PANELS[0]
    button = f"[data-figure='{figure}'] .legend [data-method='{{}}']"
    shown.find_element("css selector", button.format("vprop-2")).click()
    assert "vprop-2" not in drawn(shown, figure, "elbo") + drawn(shown, figure, "log_loss")
    press(shown, figure, "x", "linear")  # and it stays hidden
    assert "vprop-2" not in drawn(shown, figure, "elbo")
    assert "vprop-2-centered" in drawn(shown, figure, "elbo")
    shown.find_element("css selector", button.format("vogn")).click()
    assert "vogn" in drawn(shown, figure, "elbo")
    ActionChains(shown).double_click(shown.find_element("css selector", button.format("bbvi"))).perform()
    assert drawn(shown, figure, "log_loss") == ["bbvi"]


def test_the_pointer_tells_and_zooms(shown):
    from selenium.webdriver.common.action_chains import ActionChains

    figure = PANELS[0]
    svg = shown.find_element("css selector", f"[data-figure='{figure}'] [data-metric=elbo]")
    shown.execute_script("arguments[0].scrollIntoView({block: 'center'})", svg)
    at = ask(shown, figure, "(p => [p.px, p.py])(gd.drawn.elbo.drawn.find(d => d.one.method === 'vprop-2').points[3])")
    middle = svg.size["width"] / 2, svg.size["height"] / 2
    ActionChains(shown).move_to_element_with_offset(svg, round(at[0] - middle[0]), round(at[1] - middle[1])).perform()
    tip = ask(shown, figure, "gd.tip.hidden ? '' : gd.tip.textContent")
    assert tip.startswith("Vprop-2")
    assert "10 passes" in tip
    assert "± 3" in tip
    before = ask(shown, figure, "gd.drawn.log_loss.x.domain")
    ActionChains(shown).click_and_hold().move_by_offset(60, -40).release().perform()
    (low, high), other = (ask(shown, figure, f"gd.drawn.{metric}.x.domain") for metric in ("elbo", "log_loss"))
    assert before[0] < low < high < before[1]
    assert other == [low, high]  # passes go together
    ActionChains(shown).double_click(svg).perform()
    assert ask(shown, figure, "gd.drawn.elbo.x.domain") == before


def test_the_buttons(shown):
    figure = PANELS[0]
    axes = "[gd.drawn.elbo.x.type, gd.drawn.log_loss.x.type, gd.drawn.elbo.y.type]"
    assert ask(shown, figure, axes) == ["log", "log", "linear"]
    press(shown, figure, "x", "linear")
    assert ask(shown, figure, axes) == ["linear", "linear", "linear"]

    assert line(shown, figure, "vprop-2", "log_loss", "x") == PASSES
    press(shown, figure, "passes", "paper")
    assert line(shown, figure, "vprop-2", "log_loss", "x") == [passes / 2 for passes in PASSES]
    assert "as in the paper" in ask(shown, figure, "gd.querySelector('.axis-title').textContent")
    press(shown, figure, "passes", "fair")
    assert line(shown, figure, "vprop-2", "elbo", "x") == PASSES

    before, log_loss = (line(shown, figure, "vprop-2", metric) for metric in ("elbo", "log_loss"))
    press(shown, figure, "y", "distance-0")
    assert ask(shown, figure, axes) == ["linear", "linear", "log"]
    assert line(shown, figure, "vprop-2", "elbo") == pytest.approx([EXACT - value for value in before])
    assert line(shown, figure, "vprop-2", "log_loss") == log_loss
    low, high = ask(shown, figure, "gd.drawn.elbo.y.domain")
    assert low < 2.0 < 530 < high
    press(shown, figure, "y", "elbo")
    assert line(shown, figure, "vprop-2", "elbo") == before
    pressed = shown.find_elements("css selector", f"#panel-{figure} .controls button[aria-pressed='true']")
    assert [button.text for button in pressed] == ["fair", "linear", "ELBO"]


def test_what_is_drawn_is_what_was_measured(shown):
    mean = line(shown, PANELS[0], "vprop-2", "elbo")[1:]  # a log axis has no place for zero passes
    corners = pixels(shown, PANELS[0], "elbo", "vprop-2", "line")
    assert [x for x, _ in corners] == pytest.approx(PASSES[1:], rel=0.01)
    assert [y for _, y in corners] == pytest.approx(mean, abs=1.0)
    band = [y for _, y in pixels(shown, PANELS[0], "elbo", "vprop-2", "band")]  # one standard deviation, there and back
    assert band == pytest.approx([value + 3 for value in mean] + [value - 3 for value in mean[::-1]], abs=1.0)
    assert len(pixels(shown, PANELS[0], "elbo", "bbvi", "band")) == 2 * 5  # up to where it diverged


def test_a_narrow_screen_and_a_dark_one(shown):
    ground = "return getComputedStyle(document.body).backgroundColor"
    try:
        light, wide = shown.execute_script(ground), ask(shown, PANELS[0], "gd.classList.contains('narrow')")
        shown.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
        wait(shown, "return document.querySelector('.plot').classList.contains('narrow')")
        assert not wide
        assert sum(brightness(light)) > 3 * 200 > 3 * 60 > sum(brightness(shown.execute_script(ground)))
        shown.execute_script("document.querySelectorAll('details').forEach(part => { part.open = true; })")
        sizes = "const root = document.documentElement; return [root.scrollWidth, root.clientWidth];"
        width, visible = shown.execute_script(sizes)
        assert visible <= 420
        assert width <= visible
        inside = "return [...document.querySelectorAll('.scroll')].every(part => part.scrollWidth <= part.clientWidth)"
        assert shown.execute_script(inside)  # no table has to be scrolled sideways
    finally:
        shown.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def brightness(color):
    """The three numbers of rgb(…)."""
    return [int(part) for part in re.findall(r"\d+", color)[:3]]

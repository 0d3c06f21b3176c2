"""The report as a real browser shows it, without a network."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.lab.report.made_up import (
    CURVES,
    EXACT,
    PANELS,
    PASSES,
)


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

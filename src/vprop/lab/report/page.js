"use strict";
// Draws the panels of curves from the JSON in #report-data, and answers to buttons, legend, pointer and width.
(() => {
  const figures = JSON.parse(document.getElementById("report-data").textContent);
  const METRICS = ["elbo", "log_loss"];
  const NAMES = { elbo: "ELBO", log_loss: "test log-loss" };
  const PASSES = {
    fair: "passes (one = a gradient evaluation of all data)",
    paper: "passes (one = a step over all data, as in the paper)",
  };
  const NARROW = 860;
  const NEAR = 40; // pixels: what the pointer means

  // -- from a panel's numbers to what a chart needs -----------------------------------------------------------

  /** The line that the ELBO is measured from, or null where the ELBO is shown as it is. */
  function reference(panel, state) {
    return state.y === "elbo" ? null : panel.lines[Number(state.y.split("-")[1])].value;
  }

  /** Mean and both edges of the band, as shown; null where there is nothing to draw. */
  function points(method, metric, from, state) {
    const passes = state.passes === "paper" ? method.paper_passes : method.passes;
    const curve = method[metric];
    return curve.mean.map((mean, i) => {
      if (mean === null) return null;
      const std = curve.std[i] ?? 0;
      const x = passes[i];
      if (from === null) return { x, y: mean, low: mean - std, high: mean + std, std };
      const gap = from - mean;
      // A log axis has no place for a gap of zero or less: Monte Carlo noise can lift an estimate above the optimum.
      if (gap + std <= 0) return null;
      return { x, y: gap > 0 ? gap : null, low: Math.max(gap - std, 1e-9), high: gap + std, std };
    });
  }

  function seriesOf(panel, metric, state) {
    const from = metric === "elbo" ? reference(panel, state) : null;
    return panel.methods.filter((method) => method[metric] && state.visible.has(method.name)).map((method) => ({
      method: method.name, label: method.label, color: method.color, dash: method.dash, width: method.width,
      points: points(method, metric, from, state), ended: method[metric].mean.at(-1) === null,
    }));
  }

  function levelsOf(panel, metric, state) {
    const from = metric === "elbo" ? reference(panel, state) : null;
    return panel.lines.filter((line) => line.metric === metric).flatMap((line) => {
      const place = panel.lines.filter((other) => other.metric === metric && other.rank < line.rank).length;
      const value = from === null ? line.value : from - line.value;
      if (from !== null && value <= 0) return [];
      return [{ label: line.label, value, place, above: (metric === "elbo" && from === null) === (place === 0) }];
    });
  }

  /** From the first to the last pass of all methods, with a little room. */
  function span(panel, state) {
    const log = state.x === "log";
    const passes = panel.methods.flatMap((method) => (state.passes === "paper" ? method.paper_passes : method.passes));
    const shown = passes.filter((value) => value !== null && (!log || value > 0));
    if (!shown.length) return [1, 10];
    const [low, high] = [Math.min(...shown), Math.max(...shown)];
    if (log) return low === high ? [low / 2, high * 2] : [low / 1.05, high * 1.05];
    const room = 0.02 * (high - low) || 0.5;
    return [low - room, high + room];
  }

  /** The range that the report chose, or that of all that is drawn. */
  function range(panel, metric, state, drawn) {
    const distance = metric === "elbo" && state.y !== "elbo";
    const chosen = distance ? panel.ranges.distance[Number(state.y.split("-")[1])] : panel.ranges[metric];
    if (chosen) return chosen;
    const values = drawn.flatMap((one) => one.points.filter((p) => p && p.y !== null).map((p) => p.y));
    if (!values.length) return distance ? [0.1, 10] : [0, 1];
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return distance ? [low / 1.5, high * 1.5] : [low - 0.05 * (high - low || 1), high + 0.05 * (high - low || 1)];
  }

  function titleOf(panel, metric, state) {
    if (metric === "log_loss") return "Test log-loss (lower is better)";
    return state.y === "elbo" ? "ELBO (higher is better)" : `${panel.lines[Number(state.y.split("-")[1])].label} − ELBO`;
  }

  /** Pixels for the names at the right. */
  function roomFor(series) {
    return 24 + 7.2 * Math.min(Chart.LONGEST, Math.max(8, ...series.map((one) => one.label.length)));
  }

  // -- drawing ------------------------------------------------------------------------------------------------

  /** Draw, or draw again in another state or width. ``div.drawn`` keeps what is shown, for the pointer and for tests. */
  function draw(div) {
    const panel = figures[div.dataset.figure];
    const { state, svgs } = div;
    const whole = div.clientWidth;
    const narrow = whole < NARROW;
    div.dataset.width = String(whole);
    div.classList.toggle("narrow", narrow);
    const width = narrow ? whole : Math.floor((whole - 16) / 2);
    div.drawn = {};
    for (const metric of METRICS) {
      const series = seriesOf(panel, metric, state);
      const type = metric === "elbo" && state.y !== "elbo" ? "log" : "linear";
      div.drawn[metric] = {
        series, levels: levelsOf(panel, metric, state),
        ...Chart.draw(svgs[metric], {
          width, height: narrow ? 330 : 400, title: titleOf(panel, metric, state), xTitle: PASSES[state.passes],
          x: { type: state.x, domain: state.zoom.x ?? span(panel, state) },
          y: { type, domain: state.zoom[metric] ?? range(panel, metric, state, series) },
          series, levels: levelsOf(panel, metric, state), named: !narrow, roomForNames: narrow ? 10 : roomFor(series),
        }),
      };
    }
    for (const item of div.querySelectorAll(".legend button")) {
      item.setAttribute("aria-pressed", String(state.visible.has(item.dataset.method)));
    }
  }

  /** A button sets one part of the state of its panel; zoom of what it changes is given up. */
  function press(button, div) {
    div.state[button.dataset.key] = button.dataset.value;
    if (button.dataset.key === "y") delete div.state.zoom.elbo;
    else delete div.state.zoom.x;
    for (const other of button.parentElement.querySelectorAll("button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    draw(div);
  }

  // -- legend, pointer, zoom ----------------------------------------------------------------------------------

  /** A click hides or shows a method in both charts, a double click shows it alone, and another one all again. */
  function legend(div, panel) {
    const place = document.createElement("div");
    place.className = "legend";
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", "Methods");
    for (const method of panel.methods) {
      const item = document.createElement("button");
      item.type = "button";
      item.dataset.method = method.name;
      item.className = "series";
      item.style.setProperty("--c", method.color);
      const swatch = Chart.add(item, "svg", { width: 24, height: 8, "aria-hidden": "true" });
      Chart.add(swatch, "line", { class: "line", x1: 0, x2: 24, y1: 4, y2: 4, "stroke-width": 3, "stroke-dasharray": Chart.DASHES[method.dash] });
      item.append(method.label);
      item.addEventListener("click", () => {
        const { visible } = div.state;
        if (!visible.delete(method.name)) visible.add(method.name);
        draw(div);
      });
      item.addEventListener("dblclick", () => {
        const { state } = div;
        const alone = state.alone === method.name;
        state.visible = new Set(alone ? opening(panel) : [method.name]);
        state.alone = alone ? null : method.name;
        draw(div);
      });
      place.append(item);
    }
    return place;
  }

  const opening = (panel) => panel.methods.filter((method) => method.visible).map((method) => method.name);

  /** The nearest point to the pointer, if there is one near. */
  function nearest(chart, px, py) {
    let found = null;
    for (const { one, points: drawn } of chart.drawn) {
      for (const point of drawn) {
        const distance = Math.hypot(point.px - px, point.py - py);
        if (distance < (found?.distance ?? NEAR)) found = { one, point, distance };
      }
    }
    return found;
  }

  function tell(div, metric, event) {
    const svg = div.svgs[metric];
    const box = svg.getBoundingClientRect();
    const found = nearest(div.drawn[metric], event.clientX - box.left, event.clientY - box.top);
    svg.querySelector(".dot")?.remove();
    div.tip.hidden = !found;
    if (!found) return;
    const { one, point } = found;
    Chart.add(svg, "circle", { class: "series dot", cx: point.px, cy: point.py, r: 5, style: `--c:${one.color}` });
    const what = metric === "elbo" && div.state.y !== "elbo" ? "distance" : NAMES[metric];
    const name = document.createElement("b");
    name.textContent = one.label;
    const spread = point.std ? ` ± ${Chart.number(Number(point.std.toPrecision(2)))}` : "";
    div.tip.replaceChildren(name, `${Chart.number(Number(point.x.toPrecision(4)))} passes`, document.createElement("br"), `${what} ${Chart.number(point.y)}${spread}`);
    const around = div.getBoundingClientRect();
    const x = box.left - around.left + point.px;
    div.tip.style.top = `${box.top - around.top + point.py + 12}px`;
    div.tip.style.left = `${Math.min(Math.max(x + 12, 0), around.width - div.tip.offsetWidth)}px`;
  }

  /** Drag a rectangle to zoom; a double click in a chart zooms out. The passes of both charts go together. */
  function zooming(div, metric) {
    const svg = div.svgs[metric];
    let start = null;
    const place = (event) => {
      const box = svg.getBoundingClientRect();
      const { frame } = div.drawn[metric];
      return [
        Math.min(Math.max(event.clientX - box.left, frame.left), frame.right),
        Math.min(Math.max(event.clientY - box.top, frame.top), frame.bottom),
      ];
    };
    const corners = ([x, y]) => [[start[0], x].sort((a, b) => a - b), [start[1], y].sort((a, b) => a - b)];
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) start = place(event); // fingers scroll
    });
    svg.addEventListener("pointermove", (event) => {
      svg.querySelector(".zoom")?.remove();
      if (!start) { tell(div, metric, event); return; }
      const [[left, right], [top, bottom]] = corners(place(event));
      Chart.add(svg, "rect", { class: "zoom", x: left, y: top, width: right - left, height: bottom - top });
    });
    svg.addEventListener("pointerup", (event) => {
      if (!start) return;
      const [[left, right], [top, bottom]] = corners(place(event));
      start = null;
      svg.querySelector(".zoom")?.remove();
      if (right - left < 8 || bottom - top < 8) return;
      const { x, y } = div.drawn[metric];
      div.state.zoom.x = [x.back(left), x.back(right)];
      div.state.zoom[metric] = [y.back(bottom), y.back(top)];
      draw(div);
    });
    svg.addEventListener("pointerleave", () => {
      start = null;
      div.tip.hidden = true;
      svg.querySelector(".dot")?.remove();
      svg.querySelector(".zoom")?.remove();
    });
    svg.addEventListener("dblclick", () => { div.state.zoom = {}; draw(div); });
  }

  // -- all panels ---------------------------------------------------------------------------------------------

  function prepare(div) {
    const panel = figures[div.dataset.figure];
    div.state = { passes: "fair", x: "log", y: "elbo", visible: new Set(opening(panel)), alone: null, zoom: {} };
    const charts = document.createElement("div");
    charts.className = "charts";
    div.tip = document.createElement("div");
    div.tip.className = "tip";
    div.tip.hidden = true;
    div.append(legend(div, panel), charts, div.tip);
    div.svgs = Object.fromEntries(METRICS.map((metric) => [metric, Chart.add(charts, "svg", { class: "chart", "data-metric": metric })]));
    METRICS.forEach((metric) => zooming(div, metric));
    for (const button of div.closest(".panel").querySelectorAll(".controls button")) {
      button.addEventListener("click", () => press(button, div));
    }
    draw(div);
  }

  const divs = [...document.querySelectorAll(".plot")];
  divs.forEach(prepare);
  let timer = null;
  new ResizeObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(() => divs.filter((div) => div.dataset.width !== String(div.clientWidth)).forEach(draw), 80);
  }).observe(document.querySelector("main"));
  document.documentElement.dataset.ready = "true";
})();

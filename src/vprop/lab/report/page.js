"use strict";
// Draws the panels of curves from the JSON in #report-data: as traces that are made here, because the buttons change what
// x and y mean.
(() => {
  const figures = JSON.parse(document.getElementById("report-data").textContent);
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif';
  const INK = "#1f2933";
  const AXIS = {
    gridcolor: "#e9edf1", linecolor: "#9aa5b1", showline: true, ticks: "outside", tickcolor: "#9aa5b1", ticklen: 4,
    zeroline: false, tickfont: { color: "#52606d", size: 12 },
  };
  const TITLE = { font: { size: 12.5 }, standoff: 10 };
  const CONFIG = {
    displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d"],
  };
  const NAMES = { elbo: "ELBO", log_loss: "test log-loss" };
  const PASSES = {
    fair: "passes (one = a gradient evaluation of all data)",
    paper: "passes (one = a step over all data, as in the paper)",
  };

  // -- traces of a panel ------------------------------------------------------------------------------------

  /** The line that the ELBO is measured from, or null where the ELBO is shown as it is. */
  function reference(panel, state) {
    return state.y === "elbo" ? null : panel.lines[Number(state.y.split("-")[1])].value;
  }

  /** Mean and both edges of the band, as shown; null where there is nothing to draw. */
  function points(curve, from, floor) {
    return curve.mean.map((mean, i) => {
      if (mean === null) return null;
      const std = curve.std[i] ?? 0;
      if (from === null) return { y: mean, low: mean - std, high: mean + std, std };
      const gap = from - mean;
      // A log axis has no place for a gap of zero or less: Monte Carlo noise can lift an estimate above the optimum.
      if (gap + std <= 0) return null;
      return { y: gap > 0 ? gap : null, low: Math.max(gap - std, floor), high: gap + std, std };
    });
  }

  /** A closed shape for each stretch without gaps. */
  function outline(x, values, positiveOnly) {
    const shape = { x: [], y: [] };
    let run = [];
    const close = () => {
      if (run.length > 1) {
        const back = [...run].reverse();
        if (shape.x.length) { shape.x.push(null); shape.y.push(null); }
        shape.x.push(...run.map((i) => x[i]), ...back.map((i) => x[i]));
        shape.y.push(...run.map((i) => values[i].high), ...back.map((i) => values[i].low));
      }
      run = [];
    };
    values.forEach((value, i) => {
      if (value === null || x[i] === null || (positiveOnly && x[i] <= 0)) close();
      else run.push(i);
    });
    close();
    return shape;
  }

  /** A translucent version of a colour like #0072b2. */
  function pale(color, alpha) {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  }

  /** Band and line of one method in one of the two plots. */
  function pair(panel, method, metric, state, named) {
    const from = metric === "elbo" ? reference(panel, state) : null;
    const x = state.passes === "paper" ? method.paper_passes : method.passes;
    const values = points(method[metric], from, 1e-9);
    const shape = outline(x, values, state.x === "log");
    const suffix = metric === "elbo" ? "" : "2";
    const common = {
      type: "scatter", name: method.label, legendgroup: method.name, visible: method.visible,
      xaxis: "x" + suffix, yaxis: "y" + suffix,
    };
    const what = from === null ? NAMES[metric] : "distance";
    const last = values.findLastIndex((value) => value !== null);
    const ended = last >= 0 && method[metric].mean.at(-1) === null;
    const band = {
      ...common, uid: `${method.name}-${metric}-band`, meta: { method: method.name, metric, role: "band" },
      x: shape.x, y: shape.y, mode: "lines", fill: "toself", fillcolor: pale(method.color, 0.15), line: { width: 0 },
      hoverinfo: "skip", showlegend: false,
    };
    const line = {
      ...common, uid: `${method.name}-${metric}-line`, meta: { method: method.name, metric, role: "line" },
      x, y: values.map((value) => value && value.y), customdata: values.map((value) => (value ? value.std : null)),
      mode: ended ? "lines+markers" : "lines", showlegend: named,
      line: { color: method.color, width: method.width, dash: method.dash },
      hovertemplate: `<b>${method.label}</b><br>%{x:,.4~g} passes<br>${what} %{y:,.6~g} ± %{customdata:,.2~g}<extra></extra>`,
    };
    if (ended) line.marker = { symbol: "x", color: method.color, size: values.map((_, i) => (i === last ? 9 : 0)), line: { width: 0 } };
    return [band, line];
  }

  function traces(panel, state) {
    return panel.methods.flatMap((method) => {
      const metrics = ["elbo", "log_loss"].filter((metric) => method[metric]);
      // The legend has one entry for a method, on the first plot that shows it.
      return metrics.flatMap((metric, i) => pair(panel, method, metric, state, i === 0));
    });
  }

  // -- layout -----------------------------------------------------------------------------------------------

  function base() {
    return {
      font: { family: FONT, size: 13, color: INK }, paper_bgcolor: "#fff", plot_bgcolor: "#fff", hovermode: "closest",
      hoverlabel: { bgcolor: "#fff", bordercolor: "#cbd2d9", font: { family: FONT, size: 13, color: INK } },
    };
  }

  /** Dashed lines; the label of the best one is on its far side, the others' on the near side, out of each other's way. */
  function levels(panel, state) {
    const from = reference(panel, state);
    return panel.lines.flatMap((line) => {
      const rank = panel.lines.filter((other) => other.metric === line.metric && other.rank < line.rank).length;
      const above = (line.metric === "elbo" && from === null) === (rank === 0);
      const value = line.metric === "elbo" && from !== null ? from - line.value : line.value;
      if (line.metric === "elbo" && from !== null && value <= 0) return [];
      const suffix = line.metric === "elbo" ? "" : "2";
      return [{
        type: "line", xref: `x${suffix} domain`, x0: 0, x1: 1, yref: "y" + suffix, y0: value, y1: value, layer: "above",
        line: { color: INK, width: 1.2, dash: "dash" },
        label: {
          text: line.label, textposition: rank > 1 ? "end" : "start", yanchor: above ? "bottom" : "top",
          font: { size: 12, color: INK }, padding: 3,
        },
      }];
    });
  }

  function heading(text, suffix) {
    return {
      text: `<b>${text}</b>`, showarrow: false, xref: `x${suffix} domain`, yref: `y${suffix} domain`, x: 0, y: 1,
      xanchor: "left", yanchor: "bottom", yshift: 8, font: { size: 14 },
    };
  }

  /** A range as plotly wants it: logarithms on a log axis. */
  const scaled = (range, type) => (type === "log" ? range.map(Math.log10) : range);

  /** From the first to the last pass of all methods, with a little room. */
  function span(panel, state) {
    const passes = panel.methods.flatMap((method) => (state.passes === "paper" ? method.paper_passes : method.passes));
    const log = state.x === "log";
    const shown = passes.filter((value) => value !== null && (!log || value > 0));
    if (!shown.length) return { autorange: true };
    const [low, high] = scaled([Math.min(...shown), Math.max(...shown)], state.x);
    const room = 0.02 * (high - low) || 0.5;
    return { range: [low - room, high + room] };
  }

  /** Side by side with the legend at the right, or one above the other with the legend below. */
  function arrange(panel, narrow) {
    const rows = panel.methods.length;
    if (!narrow) {
      return {
        height: Math.max(430, 110 + 22 * rows), domains: { x: [0, 0.46], y: [0, 1], x2: [0.54, 1], y2: [0, 1] },
        margin: { l: 64, r: 20, t: 40, b: 56 },
        legend: { x: 1.02, xanchor: "left", y: 1, yanchor: "top", font: { size: 13 } },
      };
    }
    const legend = 20 * rows + 12;
    return {
      height: 680 + legend, domains: { x: [0, 1], y: [0.58, 1], x2: [0, 1], y2: [0, 0.42] },
      margin: { l: 58, r: 10, t: 36, b: 50 + legend },
      legend: { orientation: "v", x: 0, xanchor: "left", yref: "container", y: 0, yanchor: "bottom", font: { size: 13 } },
    };
  }

  function layout(panel, state, narrow) {
    const { height, domains, margin, legend } = arrange(panel, narrow);
    const distance = state.y !== "elbo";
    const range = distance ? panel.ranges.distance[Number(state.y.split("-")[1])] : panel.ranges.elbo;
    const x = { ...AXIS, type: state.x, title: { text: PASSES[state.passes], ...TITLE }, ...span(panel, state) };
    // Zoom survives a change of the other buttons; what the legend hides survives every change.
    x.uirevision = state.x + state.passes;
    const y = (shown, type, mode) => ({
      ...AXIS, type, automargin: true, separatethousands: true, exponentformat: type === "log" ? "power" : "none",
      uirevision: mode, ...(shown ? { range: scaled(shown, type) } : { autorange: true }),
    });
    const title = distance ? `${panel.lines[Number(state.y.split("-")[1])].label} − ELBO` : "ELBO (higher is better)";
    return {
      ...base(), height, margin, uirevision: "keep",
      legend: { ...legend, tracegroupgap: 0, itemsizing: "trace" },
      xaxis: { ...x, domain: domains.x, anchor: "y" }, yaxis: { ...y(range, distance ? "log" : "linear", state.y), domain: domains.y, anchor: "x" },
      xaxis2: { ...x, domain: domains.x2, anchor: "y2", matches: "x" },
      yaxis2: { ...y(panel.ranges.log_loss, "linear", "log-loss"), domain: domains.y2, anchor: "x2" },
      shapes: levels(panel, state), annotations: [heading(title, ""), heading("Test log-loss (lower is better)", "2")],
    };
  }

  // -- drawing ----------------------------------------------------------------------------------------------

  const NARROW = 940;
  const states = new Map();

  /** Draw, or draw again in another state or width; zoom and hidden methods stay. */
  function draw(div) {
    const figure = figures[div.dataset.figure];
    const state = states.get(div);
    const width = div.clientWidth;
    div.dataset.width = String(width);
    const config = { ...CONFIG, toImageButtonOptions: { filename: div.dataset.figure, scale: 2 } };
    const frame = layout(figure, state, width < NARROW);
    div.style.height = `${frame.height}px`;
    return Plotly.react(div, traces(figure, state), { ...frame, width }, config);
  }

  /** A button sets one part of the state of its panel. */
  function press(button, div) {
    states.get(div)[button.dataset.key] = button.dataset.value;
    for (const other of button.parentElement.querySelectorAll("button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    return draw(div);
  }

  const divs = [...document.querySelectorAll(".plot")];
  for (const div of divs) {
    states.set(div, { passes: "fair", x: "log", y: "elbo" });
    for (const button of div.closest(".panel").querySelectorAll(".controls button")) {
      button.addEventListener("click", () => press(button, div));
    }
  }

  // Plotly's own way of following the width forgets the height.
  let timer = null;
  new ResizeObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(() => divs.filter((div) => div.dataset.width !== String(div.clientWidth)).forEach(draw), 80);
  }).observe(document.querySelector("main"));
  Promise.all(divs.map(draw)).then(() => { document.documentElement.dataset.ready = "true"; });
})();

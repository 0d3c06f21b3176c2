"use strict";
// One chart as SVG: axes, bands, lines, dashed levels, names at the right ends. What is drawn is decided by the caller.
// Colours come from page.css (the variable --c is a method's own), so that a dark page needs no other drawing.
const Chart = (() => {
  const NAMESPACE = "http://www.w3.org/2000/svg";
  const DASHES = { solid: "", dash: "8 4", dot: "2 3", dashdot: "8 3 2 3" };
  const LETTER = 12.5;
  const LONGEST = 24; // letters of a name
  let charts = 0;

  /** A new element of SVG inside of another one; text is set as text, never read as markup. */
  function add(parent, name, attributes = {}, text = null) {
    const made = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    parent.append(made);
    return made;
  }

  const thousands = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });

  /** A number for people: thousands apart, a true minus, powers of ten where digits would be many. */
  function number(value) {
    const size = Math.abs(value);
    const text = size !== 0 && (size >= 1e7 || size < 1e-4) ? value.toExponential(0) : thousands.format(value);
    return text.replace("-", "−");
  }

  // -- scales and ticks ---------------------------------------------------------------------------------------

  /** Between data and pixels, straight or by logarithms. */
  function scale(type, [low, high], [from, to]) {
    const bent = type === "log" ? Math.log10 : (value) => value;
    const straight = type === "log" ? (value) => 10 ** value : (value) => value;
    const [start, end] = [bent(low), bent(high)];
    return {
      type, domain: [low, high],
      at: (value) => from + ((bent(value) - start) / (end - start || 1)) * (to - from),
      back: (pixel) => straight(start + ((pixel - from) / (to - from)) * (end - start)),
    };
  }

  /** Round numbers inside of a domain. */
  function ticks({ type, domain: [low, high] }, count) {
    if (type === "log") {
      const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
      const parts = last - first > 2 ? [1] : [1, 2, 5];
      const step = Math.max(1, Math.ceil((last - first) / (2 * count)));
      const found = [];
      for (let power = first; power <= last; power += step) parts.forEach((part) => found.push(part * 10 ** power));
      return found.filter((value) => value >= low && value <= high);
    }
    const rough = (high - low) / count;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((part) => part * unit >= rough);
    const found = [];
    for (let i = Math.ceil(low / step); i * step <= high * (1 + 1e-12 * Math.sign(high)); i += 1) found.push(Number((i * step).toPrecision(12)));
    return found;
  }

  // -- parts --------------------------------------------------------------------------------------------------

  function axes(svg, frame, x, y, spec) {
    const grid = add(svg, "g", { class: "axes" });
    const { left, top, right, bottom } = frame;
    for (const value of ticks(y, 6)) {
      add(grid, "line", { class: "rule", x1: left, x2: right, y1: y.at(value), y2: y.at(value) });
      add(grid, "text", { class: "tick", x: left - 8, y: y.at(value) + 4, "text-anchor": "end" }, number(value));
    }
    for (const value of ticks(x, Math.max(3, Math.floor((right - left) / 70)))) {
      add(grid, "line", { class: "rule", x1: x.at(value), x2: x.at(value), y1: top, y2: bottom });
      add(grid, "text", { class: "tick", x: x.at(value), y: bottom + 18, "text-anchor": "middle" }, number(value));
    }
    add(grid, "path", { class: "frame", d: `M${left},${top}V${bottom}H${right}` });
    add(grid, "text", { class: "axis-title", x: (left + right) / 2, y: bottom + 38, "text-anchor": "middle" }, spec.xTitle);
    add(grid, "text", { class: "title", x: left, y: top - 12 }, spec.title);
  }

  /** Stretches of points without gaps, in pixels. */
  function stretches(one, x, y) {
    const runs = [[]];
    one.points.forEach((point, i) => {
      const usable = point !== null && point.x !== null && (x.type !== "log" || point.x > 0);
      if (usable) runs.at(-1).push({ ...point, index: i, px: x.at(point.x), py: point.y === null ? null : y.at(point.y) });
      else if (runs.at(-1).length) runs.push([]);
    });
    return runs.filter((run) => run.length);
  }

  const path = (points) => points.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)},${py.toFixed(1)}`).join("");

  /** Band, line, and a cross where the runs ended early; returns the points of the line. */
  function series(parent, one, x, y) {
    const group = add(parent, "g", { class: "series", "data-method": one.method, style: `--c:${one.color}` });
    const runs = stretches(one, x, y);
    for (const run of runs.filter((points) => points.length > 1)) {
      const edge = [...run.map((p) => [p.px, y.at(p.high)]), ...[...run].reverse().map((p) => [p.px, y.at(p.low)])];
      add(group, "path", { class: "band", d: `${path(edge)}Z` });
    }
    const drawn = runs.map((run) => run.filter((p) => p.py !== null)).filter((run) => run.length);
    const look = { class: "line", "stroke-width": one.width, "stroke-dasharray": DASHES[one.dash] };
    for (const run of drawn) add(group, "path", { ...look, d: path(run.map((p) => [p.px, p.py])) });
    const last = drawn.at(-1)?.at(-1);
    if (one.ended && last) add(group, "path", { class: "cross", d: `M${last.px - 5},${last.py - 5}l10,10m0,-10l-10,10` });
    return drawn.flat();
  }

  /** Dashed lines; the label of the best is on its far side, the others' on the near side, out of each other's way. */
  function levels(parent, frame, y, spec) {
    for (const level of spec.levels) {
      const at = y.at(level.value);
      add(parent, "line", { class: "level", x1: frame.left, x2: frame.right, y1: at, y2: at });
      const end = level.place > 1;
      add(parent, "text", {
        class: "level-name", x: end ? frame.right - 4 : frame.left + 4, y: level.above ? at - 5 : at + 14,
        "text-anchor": end ? "end" : "start",
      }, level.label);
    }
  }

  /** Places moved as little as keeps names apart, and inside of the frame while there is room. */
  function apart(places, least, low, high) {
    const blocks = [];
    for (const place of places) {
      blocks.push({ middle: place, count: 1 });
      for (;;) {
        const last = blocks.at(-1);
        const half = ((last.count - 1) * least) / 2;
        last.middle = Math.max(Math.min(last.middle, high - half), low + half);
        const before = blocks.at(-2);
        if (!before || last.middle - before.middle >= ((last.count + before.count) * least) / 2) break;
        const count = last.count + before.count;
        blocks.splice(-2, 2, { middle: (last.middle * last.count + before.middle * before.count) / count, count });
      }
    }
    return blocks.flatMap(({ middle, count }) => Array.from({ length: count }, (_, i) => middle + (i - (count - 1) / 2) * least));
  }

  /** The names of the lines at their right ends, with a thin line to the end where a name had to move. */
  function names(svg, frame, drawn) {
    const inside = (value, low, high) => Math.min(Math.max(value, low), high);
    const ends = drawn.filter(({ points }) => points.length).map(({ one, points }) => ({
      one, x: inside(points.at(-1).px, frame.left, frame.right), y: inside(points.at(-1).py, frame.top, frame.bottom),
    })).sort((a, b) => a.y - b.y);
    const places = apart(ends.map((end) => end.y), LETTER + 2, frame.top, frame.bottom);
    ends.forEach(({ one, x, y }, i) => {
      const group = add(svg, "g", { class: "series name", "data-method": one.method, style: `--c:${one.color}` });
      add(group, "line", { class: "leader", x1: x + 2, y1: y, x2: frame.right + 10, y2: places[i] });
      add(group, "text", { x: frame.right + 13, y: places[i] + 4 }, one.label.length > LONGEST ? `${one.label.slice(0, LONGEST - 1)}…` : one.label);
    });
  }

  // -- the chart ----------------------------------------------------------------------------------------------

  /** Draws into ``svg``; returns the scales, the frame and each line's points in pixels, for the pointer. */
  function draw(svg, spec) {
    svg.replaceChildren();
    for (const [key, value] of Object.entries({ width: spec.width, height: spec.height })) svg.setAttribute(key, value);
    const frame = { left: 64, top: 34, right: spec.width - spec.roomForNames, bottom: spec.height - 46 };
    const x = scale(spec.x.type, spec.x.domain, [frame.left, frame.right]);
    const y = scale(spec.y.type, spec.y.domain, [frame.bottom, frame.top]);
    axes(svg, frame, x, y, spec);
    charts += 1;
    const clip = add(add(svg, "defs"), "clipPath", { id: `inside-${charts}` });
    const size = { width: frame.right - frame.left, height: frame.bottom - frame.top };
    add(clip, "rect", { x: frame.left, y: frame.top, ...size });
    const inside = add(svg, "g", { "clip-path": `url(#inside-${charts})` });
    const drawn = spec.series.map((one) => ({ one, points: series(inside, one, x, y) }));
    levels(inside, frame, y, spec);
    if (spec.named) names(svg, frame, drawn);
    return { x, y, frame, drawn };
  }

  return { add, draw, number, DASHES, LONGEST };
})();

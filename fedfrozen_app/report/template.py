"""Style and script of the report page.

They are Python strings because Flower's app bundle carries no .css or .js files. The page itself is
put together in page.py; the script draws {"first": round, "last": round, "charts": [...]}, each:

    {"title", "unit", "kind": "line" | "bars", "from_zero", "note",
     "series": [{"name", "colour", "dashed", "points": [[round, value or null], ...]}],
     "marks": [[round, label], ...]}
"""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --ink: #1a1f26; --soft: #59636e; --rule: #dfe3e8; --grid: #e9ecef;
  --good: #00694d; --warn: #a84a00; --code: #f0f2f5;
  /* Okabe and Ito's colours, and three of Paul Tol's for the rarer roles */
  --blue: #0072b2; --vermillion: #d55e00; --green: #009e73; --purple: #cc79a7; --orange: #e69f00;
  --sky: #56b4e9; --yellow: #e0d022; --ink2: #1a1a1a; --wine: #882255; --olive: #999933;
  --indigo: #332288; --grey: #9aa3ad;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1d2126; --ink: #e8eaed; --soft: #a3adb8; --rule: #353b43;
    --grid: #2b3037; --good: #4fd1a5; --warn: #ffa45c; --code: #262b31;
    --blue: #3d9fe0; --vermillion: #f0742b; --green: #1fbf92; --sky: #93d2f7; --yellow: #f0e442;
    --ink2: #f4f4f4; --wine: #c2557f; --olive: #b8b84d; --indigo: #8d7be0; --grey: #7d8791;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .7rem; font-size: 1.2rem; }
p { margin: .4rem 0; }
.soft { color: var(--soft); }
.warn { color: var(--warn); font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem;
  margin-top: 1.2rem; }
.card, figure, details, .box { background: var(--card); border: 1px solid var(--rule);
  border-radius: .6rem; }
.card { padding: .7rem .9rem; }
.card b { display: block; font-size: 1.5rem; line-height: 1.25; }
.card span { color: var(--soft); font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem; }
figure { position: relative; display: flex; flex-direction: column; margin: 0; padding: .8rem .9rem;
  min-width: 0; }
.plot { margin-top: auto; }  /* so that the axes of neighbours are level */
figcaption { font-weight: 600; }
figcaption small { color: var(--soft); font-weight: 400; }
figure img { display: block; max-width: 100%; height: auto; margin: .5rem auto 0; background: #fff;
  border-radius: .3rem; }
.note { color: var(--soft); font-size: .85rem; }
.legend { display: flex; flex-wrap: wrap; gap: .15rem .3rem; margin: .3rem 0 .2rem -.35rem; }
.legend button { display: inline-flex; align-items: center; gap: .35rem; padding: .15rem .35rem;
  border: 0; border-radius: .3rem; background: none; color: inherit; font: inherit;
  font-size: .83rem; cursor: pointer; }
.legend button:hover { background: var(--code); }
.legend button[aria-pressed=false] { opacity: .45; text-decoration: line-through; }
.key { flex: none; display: inline-block; width: .8rem; height: .8rem; border-radius: .15rem;
  background: var(--c); }
.key.line { height: 0; width: 1.4rem; border-top: 2px solid var(--c); border-radius: 0;
  background: none; }
.key.dashed { border-top-style: dashed; }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { fill: var(--soft); font-size: 12px; }
svg .grid { stroke: var(--grid); }
svg .axis { stroke: var(--soft); }
svg .line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round;
  stroke-linecap: round; }
svg .dashed { stroke-dasharray: 5 5; }
svg .dot { fill: var(--c); }
svg .bars { fill: var(--c); shape-rendering: crispEdges; }
svg .mark { stroke: var(--soft); stroke-dasharray: 2 3; }
svg .cursor { stroke: var(--ink); stroke-opacity: .5; }
svg:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
.tip { position: absolute; z-index: 1; padding: .4rem .6rem; border: 1px solid var(--rule);
  border-radius: .4rem; background: var(--card); box-shadow: 0 2px 8px #0003; font-size: .83rem;
  pointer-events: none; white-space: nowrap; }
.tip div { display: flex; align-items: center; gap: .4rem; }
.tip span { margin-left: auto; padding-left: .8rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--rule); text-align: left;
  vertical-align: top; }
tbody tr:last-child > * { border-bottom: 0; }
th { font-weight: 600; }
td, tbody th { overflow-wrap: anywhere; }
.pairs th { width: 45%; font-weight: 400; color: var(--soft); }
.pairs.short th { width: 6.5rem; }
.numbers th, .numbers td { text-align: right; white-space: nowrap; }
.numbers .text { text-align: left; }
.numbers tr.begins > * { border-top: 2px solid var(--soft); }
details { margin: .7rem 0; }
summary { padding: .6rem .9rem; font-weight: 600; cursor: pointer; }
details > .scroll { border-top: 1px solid var(--rule); }
pre { margin: 0; padding: .8rem .9rem; white-space: pre-wrap; overflow-wrap: anywhere;
  user-select: all; font-size: .85rem; }
@media (max-width: 52rem) { .charts { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 30rem) {
  body { padding: 1rem .6rem 2rem; }
  h1 { font-size: 1.4rem; }
  .cards { grid-template-columns: 1fr 1fr; gap: .5rem; }
  .card b { font-size: 1.25rem; }
}
@media print {
  :root {
    color-scheme: light; --page: #fff; --card: #fff; --ink: #000; --soft: #444; --rule: #ccc;
    --grid: #e5e5e5; --good: #00694d; --warn: #a84a00; --code: #fff;
    --blue: #0072b2; --vermillion: #d55e00; --green: #009e73; --sky: #56b4e9; --yellow: #e0d022;
    --ink2: #1a1a1a; --wine: #882255; --olive: #999933; --indigo: #332288; --grey: #9aa3ad;
  }
  body { max-width: none; padding: 0; font-size: 11pt; }
  figure, .card, tr { break-inside: avoid; }
  .charts { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .5rem; }
  .scroll { overflow: visible; }
  .numbers { font-size: 5.6pt; }
  .numbers th, .numbers td { padding: .1rem .14rem; }
  .numbers th { white-space: normal; vertical-align: bottom; }
  .tip { display: none; }
}
"""

SCRIPT = """
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);
const HEIGHT = 250, TOP = 24, BOTTOM = 36, RIGHT = 14;

// Everything that comes from the run goes through textContent or setAttribute, never innerHTML.
function add(parent, name, attributes = {}, text = null) {
  const inSvg = name === "svg" || parent.namespaceURI === SVG;
  const node = inSvg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

function addColoured(parent, name, attributes, series) {
  const node = add(parent, name, attributes);
  node.style.setProperty("--c", "var(--" + series.colour + ")");
  return node;
}

const keyClass = (chart, series) =>
  chart.kind === "bars" ? "key" : "key line" + (series.dashed ? " dashed" : "");

// Round steps of 1, 2 or 5 times a power of ten that cover low..high.
function ticks(low, high, count, smallest = 0) {
  const raw = Math.max((high - low) / count, smallest);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999), smallest);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({length: last - first + 1}, (_, i) => (first + i) * step);
}

const short = (value) => {
  const rounded = Number(value.toPrecision(5));
  return Math.abs(rounded) >= 1e7 ? rounded.toExponential() : rounded.toLocaleString("en");
};
const exact = (value) => value === null ? "not finite"
  : Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(2)
  : value.toLocaleString("en", {maximumFractionDigits: 4});

// For bars, each visible point becomes [round, bottom, top]; lines have bottom = top.
function stack(chart, shown) {
  const heights = new Map();
  return shown.map((series) => series.points.map(([round, value]) => {
    const bottom = chart.kind === "bars" ? heights.get(round) ?? 0 : value;
    const top = chart.kind === "bars" ? bottom + (value ?? 0) : value;
    heights.set(round, top);
    return [round, bottom, top];
  }));
}

function draw(figure, chart, hidden) {
  const svg = figure.querySelector("svg");
  const width = Math.max(svg.parentNode.clientWidth, 260);
  svg.replaceChildren();
  svg.setAttribute("viewBox", "0 0 " + width + " " + HEIGHT);

  const shown = chart.series.filter((_, i) => !hidden.has(i));
  const stacked = stack(chart, shown);
  const values = stacked.flat().map((point) => point[2]).filter((value) => value !== null);
  const rounds = [...new Set(chart.series.flatMap((one) => one.points.map(([round]) => round)))];
  let low = chart.from_zero ? 0 : Math.min(...values), high = Math.max(...values);
  if (!values.length) [low, high] = [0, 1];
  if (high - low < 1e-9 * Math.abs(high) || high === low) {
    const room = Math.abs(high) * 0.1 || 1;
    [low, high] = [chart.from_zero ? 0 : low - room, high + room];
  }
  const steps = ticks(low, high, 5);
  [low, high] = [steps[0], steps.at(-1)];
  const from = data.first - 0.6, to = data.last + 0.6;  // one axis for all, with room for bars

  const left = 12 + 7.2 * Math.max(...steps.map((step) => short(step).length));
  const x = (round) => left + (round - from) / (to - from) * (width - left - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
  for (const step of steps) {
    add(svg, "line", {class: "grid", x1: left, x2: width - RIGHT, y1: y(step), y2: y(step)});
    add(svg, "text", {x: left - 6, y: y(step) + 4, "text-anchor": "end"}, short(step));
  }
  add(svg, "line", {class: "axis", x1: left, x2: width - RIGHT, y1: y(low), y2: y(low)});
  for (const round of ticks(from, to, width / 70, 1).filter((r) => r >= from && r <= to)) {
    add(svg, "text", {x: x(round), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle"}, round);
  }
  const middle = (left + width - RIGHT) / 2;
  add(svg, "text", {x: middle, y: HEIGHT - 4, "text-anchor": "middle"}, "round");

  stacked.forEach((points, i) => {
    if (chart.kind === "bars") {
      const slot = x(1) - x(0), w = slot > 8 ? slot * 0.8 : slot;  // thin gaps would only flicker
      const path = points.map(([round, bottom, top]) =>
        "M" + (x(round) - w / 2) + " " + y(bottom) + "h" + w + "V" + y(top) + "h" + -w + "z");
      addColoured(svg, "path", {class: "bars", d: path.join("")}, shown[i]);
      return;
    }
    let path = "", pen = "M";
    for (const [round, , value] of points) {
      if (value !== null) path += pen + x(round) + " " + y(value);
      pen = value === null ? "M" : "L";
    }
    const kind = shown[i].dashed ? "line dashed" : "line";
    addColoured(svg, "path", {class: kind, d: path}, shown[i]);
    const radius = data.last - data.first <= 60 ? 2.6 : 1;
    for (const [round, , value] of points.filter((point) => point[2] !== null)) {
      addColoured(svg, "circle", {class: "dot", cx: x(round), cy: y(value), r: radius}, shown[i]);
    }
  });

  let free = 0;  // labels that would run into the one before are left to the line alone
  for (const [round, label] of chart.marks) {
    const half = label.length * 3.3, at = Math.min(Math.max(x(round), half), width - half);
    add(svg, "line", {class: "mark", x1: x(round), x2: x(round), y1: TOP - 6, y2: y(low)});
    if (at - half >= free) {
      add(svg, "text", {x: at, y: TOP - 10, "text-anchor": "middle"}, label);
      free = at + half + 6;
    }
  }
  const cursor = add(svg, "line", {class: "cursor", y1: TOP, y2: y(low), visibility: "hidden"});
  const nearest = (px) => rounds.reduce((best, round) =>
    Math.abs(x(round) - px) < Math.abs(x(best) - px) ? round : best);
  return {x, cursor, shown, nearest, rounds: rounds.sort((a, b) => a - b), width};
}

function show(figure, chart, view, round) {
  const tip = figure.querySelector(".tip");
  tip.replaceChildren();
  add(tip, "b", {}, "round " + round);
  // A stack is read from the top.
  for (const series of chart.kind === "bars" ? [...view.shown].reverse() : view.shown) {
    const point = series.points.find((candidate) => candidate[0] === round);
    if (!point || (chart.kind === "bars" && !point[1])) continue;
    const line = add(tip, "div");
    addColoured(line, "i", {class: keyClass(chart, series)}, series);
    line.append(series.name);
    add(line, "span", {}, exact(point[1]) + " " + chart.unit);
  }
  tip.hidden = false;
  const svg = figure.querySelector("svg"), px = view.x(round) * svg.clientWidth / view.width;
  const room = figure.clientWidth - tip.offsetWidth - 4;
  const right = svg.parentNode.offsetLeft + px + 12;
  const side = right <= room ? right : right - tip.offsetWidth - 24;
  tip.style.left = Math.max(4, Math.min(side, room)) + "px";
  tip.style.top = svg.parentNode.offsetTop + 20 + "px";
  for (const end of ["x1", "x2"]) view.cursor.setAttribute(end, view.x(round));
  view.cursor.setAttribute("visibility", "visible");
}

function build(figure, chart) {
  const hidden = new Set(), legend = add(figure, "div", {class: "legend"});
  const label = chart.title + ", by round; arrow keys show the values";
  const plot = add(figure, "div", {class: "plot"});
  const svg = add(plot, "svg", {role: "img", tabindex: 0, "aria-label": label});
  const tip = add(figure, "div", {class: "tip", hidden: "", "aria-live": "polite"});
  if (chart.note) add(figure, "p", {class: "note"}, chart.note);
  let view, current = null;
  const redraw = () => { hide(); view = draw(figure, chart, hidden); };
  const hide = () => {
    tip.hidden = true;
    current = null;
    if (view) view.cursor.setAttribute("visibility", "hidden");
  };
  const point = (round) => { current = round; show(figure, chart, view, round); };
  chart.series.forEach((series, i) => {
    const button = add(legend, "button", {type: "button", "aria-pressed": true});
    addColoured(button, "i", {class: keyClass(chart, series)}, series);
    button.append(series.name);
    button.addEventListener("click", () => {
      if (!hidden.delete(i)) hidden.add(i);
      button.setAttribute("aria-pressed", !hidden.has(i));
      redraw();
    });
  });
  for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, (event) => {
    const box = svg.getBoundingClientRect();
    point(view.nearest((event.clientX - box.left) * view.width / box.width));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    const place = current === null ? (move > 0 ? -1 : view.rounds.length)
      : view.rounds.indexOf(current);
    point(view.rounds[Math.max(0, Math.min(place + move, view.rounds.length - 1))]);
  });
  redraw();
  addEventListener("resize", redraw);
}

data.charts.forEach((chart, i) => {
  if (chart.series.length) build(document.getElementById("chart-" + i), chart);
});
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
document.body.dataset.ready = "1";
"""

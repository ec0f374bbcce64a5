// Draws the charts of a page, and answers the reader's hand: hover, hide, zoom.
//
// The data of a page are {"charts": [...]}, each {"title", "kind", "unit", "note", "x", ...} where x is
// {"label", "unit", "from", "to", "whole", "marks": [[place, label], ...]}, and by kind:
//
//   line, bars   "from_zero", "least",
//                "series": [{"name", "colour", "stroke", "points": [[x, value or null], ...],
//                            "band": [[x, low, high], ...] or absent}]
//   path         the same, where every series has its own x: hover picks the nearest point;
//                "steps" where it is a histogram or a step curve, which is not zoomed into
//   dots         "series": [{"name", "colour", "mean", "low", "high", "values": [[name, value], ...]}]
//   map          "rounds", "views": [{"name", "unit", "low", "high", "labels", "values": a list a label}]

"use strict";
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 250, TOP = 24, BOTTOM = 36, RIGHT = 14, SHADES = 12;
const kept = new Map();  // what the reader hid or chose, by figure: a live page keeps it when it is redrawn
let redraws = [];

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
  chart.kind === "line" || chart.kind === "path" ? ("key line " + series.stroke).trim() : "key";

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
  // Six decimals: with its usual three, neighbouring ticks would read alike.
  return Math.abs(rounded) >= 1e7 ? rounded.toExponential()
    : rounded.toLocaleString("en", {maximumFractionDigits: 6});
};
const exact = (value) => value === null ? "not finite"
  : Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(2)
  : value.toLocaleString("en", {maximumFractionDigits: 4});
const limit = (value, low, high) => Math.max(low, Math.min(value, high));
const closest = (list, distance) =>
  list.reduce((best, one, i) => distance(one) < distance(list[best]) ? i : best, 0);

// Ends of the value axis that are ticks, with room around a single value. A share spans `least`, within 0..1:
// what differs by a hair must not look like a mountain.
function span(values, fromZero, least = 0) {
  let low = fromZero ? 0 : Math.min(...values), high = Math.max(...values);
  if (!values.length) [low, high] = [0, 1];
  if (least && high - low < least) {
    low = limit((low + high - least) / 2, 0, 1 - least);
    high = low + least;
  }
  if (high - low < 1e-9 * Math.abs(high) || high === low) {
    const room = Math.abs(high) * 0.1 || 1;
    [low, high] = [fromZero ? 0 : low - room, high + room];
  }
  return ticks(low, high, 5);
}

// The x axis with its title and the marks of the stages; returns the scale.
function across(svg, axis, left, width, floor) {
  const {from, to} = axis;
  const x = (value) => left + (value - from) / (to - from) * (width - left - RIGHT);
  add(svg, "line", {class: "axis", x1: left, x2: width - RIGHT, y1: floor, y2: floor});
  const places = ticks(from, to, Math.max(width - left, 90) / 70, axis.whole ? 1 : 0);
  for (const place of places.filter((one) => one >= from && one <= to)) {
    const half = short(place).length * 3.6, at = limit(x(place), half, width - half);  // whole at an edge
    add(svg, "text", {x: at, y: floor + 16, "text-anchor": "middle"}, short(place));
  }
  const title = axis.label + (axis.unit ? ", " + axis.unit : "");
  add(svg, "text", {x: (left + width - RIGHT) / 2, y: floor + 32, "text-anchor": "middle"}, title);
  return x;
}

function marks(svg, axis, x, width, floor) {
  let free = 0;  // labels that would run into the one before are left to the line alone
  for (const [place, label] of axis.marks) {
    const half = label.length * 3.3, at = limit(x(place), half, width - half);
    add(svg, "line", {class: "mark", x1: x(place), x2: x(place), y1: TOP - 6, y2: floor});
    if (at - half >= free) {
      add(svg, "text", {x: at, y: TOP - 10, "text-anchor": "middle"}, label);
      free = at + half + 6;
    }
  }
}

// For bars, each visible point becomes [x, bottom, top]; lines have bottom = top.
function stack(chart, shown) {
  const heights = new Map();
  return shown.map((series) => series.points.map(([place, value]) => {
    const bottom = chart.kind === "bars" ? heights.get(place) ?? 0 : value;
    const top = chart.kind === "bars" ? bottom + (value ?? 0) : value;
    heights.set(place, top);
    return [place, bottom, top];
  }));
}

// Every kind of drawing gives back what hovering needs: how many spots there are, how to find the nearest,
// what to say of it, how to point at it, and how far an arrow key goes.
function drawValues(svg, chart, shown, width) {
  const stacked = stack(chart, shown);
  const values = stacked.flat().map((point) => point[2]).filter((value) => value !== null);
  for (const series of shown) for (const [, low, high] of series.band ?? []) values.push(low, high);
  const steps = span(values, chart.from_zero, chart.least), low = steps[0], high = steps.at(-1);
  const left = 12 + 7.2 * Math.max(...steps.map((step) => short(step).length));
  const y = (value) => HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
  for (const step of steps) {
    add(svg, "line", {class: "grid", x1: left, x2: width - RIGHT, y1: y(step), y2: y(step)});
    add(svg, "text", {x: left - 6, y: y(step) + 4, "text-anchor": "end"}, short(step));
  }
  const x = across(svg, chart.x, left, width, y(low));
  for (const series of shown.filter((one) => one.band?.length)) {
    const over = series.band.map(([place, , top]) => x(place) + " " + y(top));
    const under = series.band.map(([place, bottom]) => x(place) + " " + y(bottom)).reverse();
    addColoured(svg, "path", {class: "band", d: "M" + [...over, ...under].join("L") + "z"}, series);
  }
  stacked.forEach((points, i) => {
    if (chart.kind === "bars") {
      const slot = x(1) - x(0), w = slot > 8 ? slot * 0.8 : slot;  // thin gaps would only flicker
      const path = points.map(([place, bottom, top]) =>
        "M" + (x(place) - w / 2) + " " + y(bottom) + "h" + w + "V" + y(top) + "h" + -w + "z");
      addColoured(svg, "path", {class: "bars", d: path.join("")}, shown[i]);
      return;
    }
    let path = "", pen = "M";
    for (const [place, , value] of points) {
      if (value !== null) path += pen + x(place) + " " + y(value);
      pen = value === null ? "M" : "L";
    }
    addColoured(svg, "path", {class: ("line " + shown[i].stroke).trim(), d: path}, shown[i]);
    const many = chart.x.whole ? chart.x.to - chart.x.from : points.length;
    const radius = many <= 62 && !chart.steps ? 2.6 : 1;
    for (const [place, , value] of points.filter((point) => point[2] !== null)) {
      addColoured(svg, "circle", {class: "dot", cx: x(place), cy: y(value), r: radius}, shown[i]);
    }
  });
  marks(svg, chart.x, x, width, y(low));
  return chart.kind === "path" ? alongPaths(svg, chart, shown, x, y) : byPlace(svg, chart, shown, x, y(low));
}

function byPlace(svg, chart, shown, x, floor) {
  const all = chart.series.flatMap((one) => one.points.map(([place]) => place));
  const places = [...new Set(all)].sort((a, b) => a - b);
  const cursor = add(svg, "line", {class: "cursor", y1: TOP, y2: floor, visibility: "hidden"});
  return {
    spots: places.length, cursor, steps: {ArrowLeft: -1, ArrowRight: 1},
    nearest: (px) => closest(places, (place) => Math.abs(x(place) - px)),
    point: (i) => {
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(places[i]));
      return [x(places[i]), 20];
    },
    describe: (i) => {
      const lines = [];
      // A stack is read from the top.
      for (const series of chart.kind === "bars" ? [...shown].reverse() : shown) {
        const found = series.points.find((point) => point[0] === places[i]);
        if (!found || (chart.kind === "bars" && !found[1])) continue;
        const band = series.band?.find((point) => point[0] === places[i]);
        const room = band ? " (" + exact(band[1]) + " to " + exact(band[2]) + ")" : "";
        lines.push([series, series.name, exact(found[1]) + " " + chart.unit + room]);
      }
      return [chart.x.label + " " + short(places[i]), lines];
    },
  };
}

function alongPaths(svg, chart, shown, x, y) {
  const spots = shown.flatMap((series) => series.points.filter((point) => point[1] !== null)
    .map(([place, value, name]) => ({series, place, value, name, px: x(place), py: y(value)})));
  const cursor = add(svg, "circle", {class: "cursor", r: 6, visibility: "hidden"});
  return {
    spots: spots.length, cursor, steps: {ArrowLeft: -1, ArrowRight: 1},
    nearest: (px, py) => closest(spots, (spot) => Math.hypot(spot.px - px, spot.py - py)),
    point: (i) => {
      cursor.setAttribute("cx", spots[i].px);
      cursor.setAttribute("cy", spots[i].py);
      return [spots[i].px, 20];
    },
    describe: (i) => [spots[i].name, [
      [spots[i].series, spots[i].series.name, exact(spots[i].value) + " " + chart.unit],
      [null, chart.x.label, exact(spots[i].place) + " " + chart.x.unit],
    ]],
  };
}

function drawDots(svg, chart, shown, width) {
  const line = 38, floor = TOP + line * Math.max(shown.length, 1), left = 14;
  const every = shown.flatMap((one) => [one.mean, one.low, one.high, ...one.values.map((pair) => pair[1])]);
  const steps = span(every.filter((value) => value !== null), false, chart.least);
  const x = across(svg, {...chart.x, from: steps[0], to: steps.at(-1)}, left, width, floor);
  const y = (i) => TOP + line * i + 26;
  svg.setAttribute("viewBox", "0 0 " + width + " " + (floor + BOTTOM));
  for (const step of steps) {
    add(svg, "line", {class: "grid", x1: x(step), x2: x(step), y1: TOP, y2: floor});
  }
  shown.forEach((series, i) => {
    add(svg, "text", {x: left, y: y(i) - 12}, series.name);
    if (series.low !== null) {
      const ends = {class: "whisker", x1: x(series.low), x2: x(series.high), y1: y(i), y2: y(i)};
      addColoured(svg, "line", ends, series);
    }
    for (const [, value] of series.values) {
      addColoured(svg, "circle", {class: "seed", cx: x(value), cy: y(i), r: 3}, series);
    }
    addColoured(svg, "circle", {class: "dot", cx: x(series.mean), cy: y(i), r: 5}, series);
  });
  const frame = {class: "cursor", x: left, width: width - left - RIGHT, height: line, visibility: "hidden"};
  const cursor = add(svg, "rect", frame);
  return {
    spots: shown.length, cursor, steps: {ArrowUp: -1, ArrowDown: 1},
    nearest: (px, py) => closest(shown.map((_, i) => i), (i) => Math.abs(y(i) - 8 - py)),
    point: (i) => {
      cursor.setAttribute("y", TOP + line * i);
      return [x(shown[i].mean), TOP + line * (i + 1)];
    },
    describe: (i) => {
      const {name, mean, low, high, values} = shown[i];
      const room = low === null ? "" : " (" + exact(low) + " to " + exact(high) + ")";
      const seeds = values.map(([seed, value]) => [null, seed, exact(value)]);
      return [name, [[shown[i], "mean", exact(mean) + room], ...seeds.slice(0, 12)]];
    },
  };
}

function drawMap(svg, chart, view, width) {
  const {labels, values, low, high} = view;
  const tall = limit(Math.round(360 / Math.max(labels.length, 1)), 3, 18), floor = TOP + tall * labels.length;
  const left = 14 + 7.2 * Math.max(...labels.map((label) => Math.min(label.length, 16)));
  svg.setAttribute("viewBox", "0 0 " + width + " " + (floor + BOTTOM));
  const x = across(svg, chart.x, left, width, floor);
  const wide = x(1) - x(0), gap = wide > 6 && tall > 6 ? 1 : 0;
  const every = Math.ceil(14 / tall);  // labels that would overlap are left out
  labels.forEach((label, i) => {
    const place = {x: left - 6, y: TOP + tall * (i + 0.5) + 4, "text-anchor": "end"};
    const cut = label.length > 16 ? label.slice(0, 15) + "…" : label;
    if (i % every === 0) add(svg, "text", place, cut);
  });
  const shades = Array.from({length: SHADES}, () => "");
  values.forEach((line, i) => line.forEach((value, j) => {
    if (value === null) return;
    const shade = Math.round(limit((value - low) / (high - low || 1), 0, 1) * (SHADES - 1));
    shades[shade] += "M" + (x(chart.rounds[j]) - wide / 2) + " " + (TOP + tall * i)
      + "h" + (wide - gap) + "v" + (tall - gap) + "h" + (gap - wide) + "z";
  }));
  shades.forEach((d, i) => {
    if (d) add(svg, "path", {class: "cell", d, "fill-opacity": 0.15 + 0.85 * i / (SHADES - 1)});
  });
  marks(svg, chart.x, x, width, floor);
  const cursor = add(svg, "rect", {class: "cursor", width: wide, height: tall, visibility: "hidden"});
  const columns = chart.rounds.length;
  return {
    spots: columns * labels.length, cursor,
    steps: {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns},
    nearest: (px, py) => columns * limit(Math.floor((py - TOP) / tall), 0, labels.length - 1)
      + closest(chart.rounds, (round) => Math.abs(x(round) - px)),
    point: (i) => {
      const row = Math.floor(i / columns), round = chart.rounds[i % columns];
      cursor.setAttribute("x", x(round) - wide / 2);
      cursor.setAttribute("y", TOP + tall * row);
      return [x(round), Math.max(TOP + tall * (row + 1), 20)];
    },
    describe: (i) => {
      const row = Math.floor(i / columns), value = values[row][i % columns];
      const shown = value === null ? "nothing" : exact(value) + " " + view.unit;
      return [chart.x.label + " " + chart.rounds[i % columns], [[null, labels[row], shown]]];
    },
  };
}

function show(figure, chart, view, i) {
  const tip = figure.querySelector(".tip"), svg = figure.querySelector("svg"), plot = svg.parentNode;
  const [title, lines] = view.describe(i), [px, py] = view.point(i);
  tip.replaceChildren();
  add(tip, "b", {}, title);
  for (const [series, name, value] of lines) {
    const line = add(tip, "div");
    if (series) addColoured(line, "i", {class: keyClass(chart, series)}, series);
    line.append(name);
    add(line, "span", {}, value);
  }
  tip.hidden = false;
  const scale = svg.clientWidth / view.width, room = figure.clientWidth - tip.offsetWidth - 4;
  const right = plot.offsetLeft + px * scale + 12;
  tip.style.left = limit(right <= room ? right : right - tip.offsetWidth - 24, 4, Math.max(room, 4)) + "px";
  tip.style.top = plot.offsetTop + py * scale + 4 + "px";
  view.cursor.setAttribute("visibility", "visible");
}

function choose(figure, chart, state, redraw) {
  const line = add(figure, "div", {class: "view"});
  if (chart.views.length > 1) {
    const select = add(line, "select", {"aria-label": "What the map shows"});
    chart.views.forEach((view, i) => add(select, "option", {value: i}, view.name));
    select.value = state.view;
    select.addEventListener("change", () => { state.view = Number(select.value); redraw(); });
  }
  const low = add(line, "span"), ramp = add(line, "i", {class: "ramp"}), high = add(line, "span");
  return () => {
    const view = chart.views[state.view];
    low.textContent = (chart.views.length > 1 ? "" : view.name + ": ") + short(view.low);
    high.textContent = short(view.high) + (view.unit ? " " + view.unit : "");
    ramp.title = view.name;
  };
}

// The same chart from the middle of its x axis on, where curves that began alike differ.
function secondHalf(chart) {
  const from = (chart.x.from + chart.x.to) / 2, late = (points) => points.filter((point) => point[0] >= from);
  const series = chart.series.map((one) =>
    ({...one, points: late(one.points), band: one.band && late(one.band)}));
  const marks = chart.x.marks.filter(([place]) => place >= from);
  return {...chart, x: {...chart.x, from: chart.x.whole ? Math.ceil(from) - 0.6 : from, marks}, series};
}

function build(figure, whole) {
  let chart = whole;
  if (!kept.has(chart.title)) kept.set(chart.title, {hidden: new Set(), view: 0, late: false});
  const state = kept.get(chart.title);
  let view, current = null, label = () => {};
  const redraw = () => {
    hide();
    chart = state.late ? secondHalf(whole) : whole;
    const width = Math.max(plot.clientWidth, 260);
    const shown = (chart.series ?? []).filter((series) => !state.hidden.has(series.name));
    svg.replaceChildren();
    svg.setAttribute("viewBox", "0 0 " + width + " " + HEIGHT);
    label();
    view = chart.kind === "map" ? drawMap(svg, chart, chart.views[state.view], width)
      : chart.kind === "dots" ? drawDots(svg, chart, shown, width)
      : drawValues(svg, chart, shown, width);
    view.width = width;
  };
  const hide = () => {
    tip.hidden = true;
    current = null;
    if (view) view.cursor.setAttribute("visibility", "hidden");
  };
  const point = (i) => { current = i; show(figure, chart, view, i); };
  if (chart.kind === "map") {
    if (!chart.views[state.view]) state.view = 0;
    label = choose(figure, chart, state, () => redraw());
  } else {
    const legend = add(figure, "div", {class: "legend"});
    for (const series of chart.series) {
      const pressed = !state.hidden.has(series.name);
      const button = add(legend, "button", {type: "button", "aria-pressed": pressed});
      addColoured(button, "i", {class: keyClass(chart, series)}, series);
      button.append(series.name);
      button.addEventListener("click", () => {
        if (!state.hidden.delete(series.name)) state.hidden.add(series.name);
        button.setAttribute("aria-pressed", !state.hidden.has(series.name));
        redraw();
      });
    }
    const lines = chart.kind === "line" || chart.kind === "path";
    if (lines && !chart.steps && chart.series.some((one) => one.points.length > 8)) {
      const looks = {type: "button", class: "zoom", "aria-pressed": state.late};
      const zoom = add(figure.querySelector("figcaption"), "button", looks, "second half");
      zoom.addEventListener("click", () => {
        state.late = !state.late;
        zoom.setAttribute("aria-pressed", state.late);
        redraw();
      });
    }
  }
  const plot = add(figure, "div", {class: "plot"});
  const described = chart.title + ", by " + chart.x.label + "; arrow keys show the values";
  const svg = add(plot, "svg", {role: "img", tabindex: 0, "aria-label": described});
  const tip = add(figure, "div", {class: "tip", hidden: "", "aria-live": "polite"});
  if (chart.note) add(figure, "p", {class: "note"}, chart.note);
  for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, (event) => {
    if (!view.spots) return;
    const box = svg.getBoundingClientRect(), scale = view.width / box.width;
    point(view.nearest((event.clientX - box.left) * scale, (event.clientY - box.top) * scale));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const move = view.steps[event.key];
    if (!move || !view.spots) return;
    event.preventDefault();
    const next = current === null ? (move > 0 ? 0 : view.spots - 1) : current + move;
    point(limit(next, 0, view.spots - 1));
  });
  redraw();
  redraws.push(redraw);
}

function mount() {
  redraws = [];
  JSON.parse(document.getElementById("data").textContent).charts.forEach((chart, i) => {
    if ((chart.series ?? chart.views).length) build(document.getElementById("chart-" + i), chart);
  });
  document.body.dataset.ready = "1";
}

addEventListener("resize", () => redraws.forEach((redraw) => redraw()));
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
mount();

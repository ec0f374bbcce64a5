"""How the pages look: light, dark, on a phone and printed.

Style and script are Python strings because Flower's app bundle carries no .css or .js files.
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
p.text { max-width: 46rem; margin-bottom: .8rem; }
.soft { color: var(--soft); }
.warn { color: var(--warn); font-weight: 600; }
.good { color: var(--good); font-weight: 600; }
a { color: var(--blue); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem;
  margin-top: 1.2rem; }
.card, figure, details, .box { background: var(--card); border: 1px solid var(--rule);
  border-radius: .6rem; }
.card { padding: .7rem .9rem; }
.card b { display: block; font-size: 1.5rem; line-height: 1.25; }
.card span { color: var(--soft); font-size: .85rem; }
.wide { grid-column: 1 / -1; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem;
  grid-auto-flow: dense; }
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
.zoom { float: right; padding: .1rem .5rem; border: 1px solid var(--rule); border-radius: .3rem;
  background: none; color: var(--soft); font: inherit; font-size: .8rem; font-weight: 400; cursor: pointer; }
.zoom[aria-pressed=true] { background: var(--soft); color: var(--card); }
.legend button[aria-pressed=false] { opacity: .45; text-decoration: line-through; }
.key { flex: none; display: inline-block; width: .8rem; height: .8rem; border-radius: .15rem;
  background: var(--c); }
.key.line { height: 0; width: 1.4rem; border-top: 2px solid var(--c); border-radius: 0;
  background: none; }
.key.dashed { border-top-style: dashed; }
.key.dotted { border-top-style: dotted; }
.key, .ramp { print-color-adjust: exact; }
.ramp { display: inline-block; width: 6rem; height: .7rem; border-radius: .15rem; background:
  linear-gradient(to right, color-mix(in srgb, var(--blue) 15%, transparent), var(--blue)); }
.view { display: flex; flex-wrap: wrap; align-items: center; gap: .4rem .6rem; margin: .4rem 0 .2rem;
  color: var(--soft); font-size: .83rem; }
.view select { max-width: 100%; padding: .2rem .3rem; border: 1px solid var(--rule); border-radius: .3rem;
  background: var(--card); color: var(--ink); font: inherit; }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { fill: var(--soft); font-size: 12px; }
svg .grid { stroke: var(--grid); }
svg .axis { stroke: var(--soft); }
svg .band { fill: var(--c); fill-opacity: .16; }
svg .cell { fill: var(--blue); shape-rendering: crispEdges; }
svg .whisker { stroke: var(--c); stroke-width: 2; }
svg .seed { fill: var(--c); fill-opacity: .45; }
svg .line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round;
  stroke-linecap: round; }
svg .dashed { stroke-dasharray: 5 5; }
svg .dotted { stroke-dasharray: 1 5; }
svg .dot { fill: var(--c); }
svg .bars { fill: var(--c); shape-rendering: crispEdges; }
svg .mark { stroke: var(--soft); stroke-dasharray: 2 3; }
svg .cursor { fill: none; stroke: var(--ink); stroke-opacity: .6; }
svg:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
.tip { position: absolute; z-index: 1; padding: .4rem .6rem; border: 1px solid var(--rule);
  border-radius: .4rem; background: var(--card); box-shadow: 0 2px 8px #0003; font-size: .83rem;
  pointer-events: none; white-space: nowrap; }
.tip div { display: flex; align-items: center; gap: .4rem; }
.tip span { margin-left: auto; padding-left: .8rem; font-variant-numeric: tabular-nums; }
.live { position: sticky; top: 0; z-index: 2; margin: 0 0 .8rem; padding: .3rem .7rem;
  border: 1px solid var(--rule); border-radius: .4rem; background: var(--code); color: var(--soft);
  font-size: .85rem; }
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
.numbers td.text { white-space: normal; min-width: 9rem; }
.numbers td small { display: block; color: var(--soft); }
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
  .numbers { font-size: 9pt; }
  details .numbers { font-size: 5.6pt; }
  details .numbers th, details .numbers td { padding: .1rem .14rem; }
  .numbers th { white-space: normal; vertical-align: bottom; }
  .tip, .live, figcaption .zoom { display: none; }
  .view select { appearance: none; padding: 0; border: 0; }
}
"""

"""The style of the report's page, light and dark, and the few lines of script that show values under the pointer."""

from typing import Final

STYLE: Final = """
:root {
  --paper: #f6f7f9; --card: #ffffff; --ink: #1b2430; --soft: #5b6776; --edge: #dfe4ea; --grid: #e9edf1; --quiet: #b6c0cb;
  --problem: #b3261e; --problem-soft: #fceceb; --warning: #8a5300; --warning-soft: #fff3dc;
  --well: #1f6f43; --well-soft: #e4f4ea; --bar: #7d9cc4; --track: #eef1f5;
  --s0: #c4352b; --s1: #2a6fdb; --s2: #c46a00; --s3: #7a4bd1; --s4: #0c7f80; --s5: #b8327a; --s6: #3b8030; --s7: #55657a;
  --h0: #eef2f6; --h1: #fdebd3; --h2: #fcd2a2; --h3: #f7ab64; --h4: #e67c33; --h5: #bb471c; --h6: #7f1d1d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #10151c; --card: #19212b; --ink: #e8edf3; --soft: #9fabb9; --edge: #2b3643; --grid: #26303c; --quiet: #50606f;
    --problem: #ff8a80; --problem-soft: #3a1f20; --warning: #ffc266; --warning-soft: #372a14;
    --well: #7fd6a2; --well-soft: #17301f; --bar: #5f83b3; --track: #232d39;
    --s0: #ff7d73; --s1: #6ea8ff; --s2: #ffb057; --s3: #b79bff; --s4: #46cfcf; --s5: #ff86bf; --s6: #86dc7b; --s7: #a9b7c8;
    --h0: #222c38; --h1: #43301f; --h2: #6b4221; --h3: #9c5a24; --h4: #d07a30; --h5: #f6a457; --h6: #ffdcae;
  }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 56px }
h1 { font-size: 28px; margin: 0; letter-spacing: -0.01em }
h2 { font-size: 19px; margin: 40px 0 4px }
h3 { font-size: 15px; margin: 0 0 2px; overflow-wrap: anywhere }
p { margin: 0 }
.note { color: var(--soft); font-size: 13.5px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 20px 0 0 }
.tile, .card, .finding { background: var(--card); border: 1px solid var(--edge); border-radius: 10px }
.tile { padding: 12px 16px }
.tile b { display: block; font-size: 25px; line-height: 1.25; font-weight: 650; font-variant-numeric: tabular-nums }
.tile span { color: var(--soft); font-size: 13.5px }
.tile.problem b { color: var(--problem) } .tile.warning b { color: var(--warning) } .tile.well b { color: var(--well) }
.card { padding: 14px 16px; margin-top: 10px; overflow-x: auto }
.finding { display: flex; gap: 14px; align-items: flex-start; padding: 12px 16px; margin-top: 10px; border-left-width: 5px }
.finding.problem { border-left-color: var(--problem) } .finding.warning { border-left-color: var(--warning) }
.finding b { font-weight: 600; overflow-wrap: anywhere }
.chip { flex: none; display: inline-block; min-width: 78px; text-align: center; border-radius: 99px; padding: 1px 10px;
  font-size: 12.5px; font-weight: 600; white-space: nowrap }
.chip.problem { background: var(--problem-soft); color: var(--problem) }
.chip.warning { background: var(--warning-soft); color: var(--warning) }
.chip.well { background: var(--well-soft); color: var(--well) }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 12px; margin-top: 10px }
.pair .card, .small .card { margin-top: 0 }
.small { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 12px; margin-top: 10px }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums }
th { text-align: right; font-weight: 600; color: var(--soft); font-size: 12.5px; padding: 4px 10px; white-space: nowrap;
  border-bottom: 1px solid var(--edge) }
td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--grid); white-space: nowrap }
tr:last-child td { border-bottom: 0 }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }
td:nth-child(-n+2) { white-space: normal; overflow-wrap: anywhere; min-width: 90px }
svg { display: block; width: 100%; height: auto; min-width: 300px }
.wide svg { min-width: 760px }
svg.spark { width: 110px; min-width: 110px; height: 26px }
svg text { fill: var(--ink); font-size: 13px } svg .tick { fill: var(--soft); font-size: 12px } svg .value { font-size: 12.5px }
.small svg text { font-size: 14px }
.grid { stroke: var(--grid); fill: none } .leader { stroke: var(--quiet); fill: none }
.quiet[stroke-dasharray] { stroke: var(--soft) }
.card .note { margin-bottom: 8px }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round } .quiet { fill: none; stroke: var(--quiet); stroke-width: 1.4 }
.line.s0 { stroke: var(--s0) } .line.s1 { stroke: var(--s1) } .line.s2 { stroke: var(--s2) } .line.s3 { stroke: var(--s3) }
.line.s4 { stroke: var(--s4) } .line.s5 { stroke: var(--s5) } .line.s6 { stroke: var(--s6) } .line.s7 { stroke: var(--s7) }
svg .name { font-weight: 600 }
svg .name.s0 { fill: var(--s0) } svg .name.s1 { fill: var(--s1) } svg .name.s2 { fill: var(--s2) }
svg .name.s3 { fill: var(--s3) } svg .name.s4 { fill: var(--s4) } svg .name.s5 { fill: var(--s5) }
svg .name.s6 { fill: var(--s6) }
svg .name.s7 { fill: var(--s7) }
.h0 { fill: var(--h0) } .h1 { fill: var(--h1) } .h2 { fill: var(--h2) } .h3 { fill: var(--h3) } .h4 { fill: var(--h4) }
.h5 { fill: var(--h5) } .h6 { fill: var(--h6) }
.bar { fill: var(--bar) } .bar.marked { fill: var(--s0) } .track { fill: var(--track) }
#tip { position: fixed; display: none; pointer-events: none; background: var(--card); border: 1px solid var(--edge);
  border-radius: 8px; padding: 6px 10px; font-size: 13px; box-shadow: 0 4px 16px #0003; max-width: 340px; z-index: 2 }
#tip b { font-weight: 600 } .cross { stroke: var(--soft); stroke-dasharray: 2 3 }
details { margin-top: 40px } summary { cursor: pointer; font-weight: 600 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 6px 18px; margin: 12px 0 0 }
dt { font-weight: 600 } dd { margin: 0 }
@media (max-width: 640px) { dl { display: block } dd { margin: 0 0 8px } .finding { display: block } }
@media print { body { background: none } .card, .tile, .finding { break-inside: avoid } }
"""

SCRIPT: Final = """
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart), times = chart.times;
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "path");
  cross.setAttribute("class", "cross");
  svg.append(cross);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const share = ((event.clientX - box.left) * view.width / box.width - chart.from) / (chart.to - chart.from);
    if (share < 0 || share > 1) return hide();
    const wanted = times[0] + share * (times[times.length - 1] - times[0]);
    let at = 0;
    times.forEach((time, place) => { if (Math.abs(time - wanted) < Math.abs(times[at] - wanted)) at = place; });
    const x = chart.from + (times[at] - times[0]) / Math.max(1, times[times.length - 1] - times[0]) * (chart.to - chart.from);
    cross.setAttribute("d", `M${x} 8V${view.height - 26}`);
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = new Date(times[at] * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC";
    tip.append(head);
    for (const line of chart.lines) if (line.values[at] !== null) {
      const row = document.createElement("div");
      row.textContent = `${line.name}: ${line.values[at]}`;
      row.style.color = line.class === "quiet" ? "" : `var(--${line.class})`;
      tip.append(row);
    }
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
  });
  const hide = () => { tip.style.display = "none"; cross.setAttribute("d", ""); };
  svg.addEventListener("pointerleave", hide);
}
"""

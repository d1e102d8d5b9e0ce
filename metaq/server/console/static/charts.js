// Charts: an element with data-chart is drawn from the numbers at that address, which are fetched again every 10 s.
// data-series names its lines as figure:label|figure:label, data-unit says how values are written.
"use strict";

const AGAIN_MS = 10000;
const HEIGHT = 190;
const COLOURS = ["--accent", "--warn"];
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];

function size(value) {
  let at = 0;
  while (value >= 1024 && at < SIZES.length - 1) { value /= 1024; at += 1; }
  return `${value.toLocaleString("en", { maximumFractionDigits: value < 10 && at ? 1 : 0 })} ${SIZES[at]}`;
}

const WRITTEN = {
  number: (value) => value.toLocaleString("en", { notation: value >= 10000 ? "compact" : "standard", maximumFractionDigits: value < 10 ? 2 : 1 }),
  ratio: (value) => `${(100 * value).toLocaleString("en", { maximumFractionDigits: 1 })} %`,
  seconds: (value) => (value < 1 ? `${(1000 * value).toLocaleString("en", { maximumFractionDigits: 1 })} ms` : `${value.toFixed(1)} s`),
  size,
};

class Chart {
  constructor(box) {
    this.box = box;
    this.lines = box.dataset.series.split("|").map((line) => line.split(":"));
    this.plot = null;
    new ResizeObserver(() => this.resize()).observe(box);
  }

  show(numbers) {
    const times = numbers.times_ms.map((time) => time / 1000);
    const data = [times, ...this.lines.map(([figure]) => (numbers.figures || numbers)[figure])];
    if (this.plot !== null) this.plot.setData(data);
    else if (times.length > 1) this.draw(data);
  }

  draw(data) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const written = WRITTEN[this.box.dataset.unit];
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const lines = this.lines.map(([, label], at) => ({
      label, width: 1.75, stroke: colour(COLOURS[at]), points: { show: false },
      fill: at === 0 && this.lines.length === 1 ? `color-mix(in srgb, ${colour(COLOURS[at])} 14%, transparent)` : undefined,
      value: (_, value) => (value === null || value === undefined ? "–" : written(value)),
    }));
    this.plot = new uPlot({
      width: this.box.clientWidth, height: HEIGHT, tzDate: (time) => uPlot.tzDate(new Date(time * 1000), "Etc/UTC"),
      series: [{ value: "{YYYY}-{MM}-{DD} {HH}:{mm}:{ss}" }, ...lines],
      scales: { y: { range: (_, __, most) => [0, most > 0 ? most * 1.15 : 1] } },
      axes: [{ ...axis, space: 90, values: [[3600, "{HH}:{mm}"], [60, "{HH}:{mm}"], [1, "{HH}:{mm}:{ss}"]] }, { ...axis, size: 74, values: (_, values) => values.map(written) }],
    }, data, this.box);
  }

  resize() {
    if (this.plot !== null && this.box.clientWidth) this.plot.setSize({ width: this.box.clientWidth, height: HEIGHT });
  }

  forget() {
    if (this.plot !== null) this.plot.destroy();
    this.plot = null;
  }
}

function follow(address, charts) {
  async function fetchAgain() {
    try {
      const answer = await fetch(address, { headers: { "Metaq-Poll": "1" } });
      if (answer.ok) {
        const numbers = await answer.json();
        charts.forEach((chart) => chart.show(numbers));
      }
    } catch { /* the broker is away for a moment: what is drawn stays, and the next time may do */ }
    window.setTimeout(fetchAgain, AGAIN_MS);
  }
  fetchAgain();
}

document.addEventListener("DOMContentLoaded", () => {
  const byAddress = new Map();
  document.querySelectorAll("[data-chart]").forEach((box) => {
    const address = box.dataset.chart;
    if (!byAddress.has(address)) byAddress.set(address, []);
    byAddress.get(address).push(new Chart(box));
  });
  byAddress.forEach((charts, address) => follow(address, charts));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    byAddress.forEach((charts) => charts.forEach((chart) => {
      const data = chart.plot && chart.plot.data;
      chart.forget();
      if (data) chart.draw(data);
    }));
  });
});

// Curves over time.

import { clock, colour } from "./dom.js";

const POINTS_MAX = 3000;

export class Chart {
  /** `curves`: name, colour and a function that puts a value into words, in the order of the columns after the time. */
  constructor(place, curves, fromZero = true) {
    this.place = place;
    this.curves = curves;
    this.scales = fromZero ? { y: { range: (_, __, most) => [0, (most || 1) * 1.1] } } : {};
    this.rows = [];
    new ResizeObserver(() => this.plot?.setSize({ width: place.clientWidth, height: 220 })).observe(place);
  }

  set(rows) {
    this.rows = rows;
    this.repaint();
  }

  add(row) {
    const last = this.rows.at(-1);
    if (last && row[0] <= last[0]) return;
    this.rows.push(row);
    if (this.rows.length > POINTS_MAX) this.rows = this.rows.filter((_, index) => index % 2);
    if (this.plot) this.plot.setData(this.columns());
    else this.repaint();
  }

  columns() {
    return ["time", ...this.curves].map((_, column) => this.rows.map((row) => row[column]));
  }

  /** With the colours of the theme. */
  repaint() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.rows.length) return;
    const axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 } };
    this.plot = new window.uPlot({
      width: this.place.clientWidth, height: 220, cursor: { drag: { x: true, y: false } },
      scales: this.scales,
      axes: [{ ...axis, space: 80, values: (_, values) => values.map(clock) }, { ...axis, size: 66, values: (_, values) => values.map(this.curves[0][2]) }],
      series: [{ label: "time", value: (_, value) => (value ? clock(value) : "–") },
        ...this.curves.map(([label, name, words], index) => ({
          label, stroke: colour(name), width: index ? 1.5 : 2, points: { show: false }, value: (_, value) => (value === null || value === undefined ? "–" : words(value)),
        }))],
    }, this.columns(), this.place);
  }
}

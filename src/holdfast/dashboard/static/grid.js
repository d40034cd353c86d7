// All ranks on one canvas, up to tens of thousands: colour by stage, lag or step time; culprits are outlined.

import { colour, h, milliseconds, plural } from "./dom.js";

const STAGES = { s: "starting", m: "meeting", g: "grouping", r: "ready", t: "stepping", d: "done", w: "spare" };
const STAGE_FILL = { s: "busyfill", m: "busyfill", g: "downfill", r: "coldfill", t: "goodfill", d: "endfill", w: "coldfill" };
const SCALE = ["goodfill", "coldfill", "busyfill", "downfill", "badfill"];
const HEIGHT_MAX = 420;
const CELL_MAX = 44;
const NUMBERED_MIN = 26;  // cells with the number of their rank

/** `show(rank)` gets the rank that is pointed at, or null. */
export class Grid {
  constructor(canvas, text) {
    this.canvas = canvas;
    this.text = text;
    this.now = null;
    this.by = "stage";
    this.node = -1;
    this.at = -1;
    this.pointed = -1;
    this.since = "";  // what steps are counted from, in words
    canvas.addEventListener("pointermove", (event) => this.point(this.under(event)));
    canvas.addEventListener("pointerdown", (event) => this.point(this.under(event)));
    canvas.addEventListener("pointerleave", () => this.point(-1));
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  update(now) {
    this.now = now;
    this.draw();
    this.tell();
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns, Home: -1e9, End: 1e9 };
    if (!(event.key in steps) || !this.now) return;
    event.preventDefault();
    this.point(Math.min(this.now.ranks.rank.length - 1, Math.max(0, this.pointed + steps[event.key])));
  }

  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.cell), row = Math.floor((event.clientY - box.top) / this.cell);
    const index = row * this.columns + column;
    return this.now && column < this.columns && index < this.now.ranks.rank.length ? index : -1;
  }

  point(index) {
    if (index === this.pointed) return;
    this.pointed = index;
    this.draw();
    this.tell();
  }

  tell() {
    const { now, pointed: index } = this;
    if (!now || index < 0 || index >= now.ranks.rank.length) {
      this.text.textContent = now ? "Point at a rank, or use the arrow keys." : "";
      return;
    }
    const ranks = now.ranks, standing = now.standing[ranks.rank[index]];
    this.text.textContent = [
      `rank ${ranks.rank[index]} on ${now.nodes[ranks.node[index]].host} (local ${ranks.local[index]}${ranks.pid[index] ? `, pid ${ranks.pid[index]}` : ""})`,
      standing ? `${standing[0]}${standing[1] ? `: ${standing[1]}` : ""}` : STAGES[ranks.stage[index]],
      ranks.stage[index] === "w" ? "" : `step ${ranks.steps[index]}${this.since ? ` ${this.since}` : ""}`,
      ranks.step_ms[index] ? `${milliseconds(ranks.step_ms[index])} a step, own part ${milliseconds(ranks.own_ms[index])}` : "",
      ranks.stage[index] === "w" ? "" : `last step ${ranks.age_s[index]} s ago`,
    ].filter(Boolean).join(" · ");
  }

  /** The number of a colour in SCALE, or its name. */
  fillOf(index, ranks, most, median) {
    if (ranks.stage[index] === "w") return "endfill";  // a spare has the step of an earlier generation
    if (this.by === "lag") return Math.min(4, Math.ceil(Math.log2(1 + most - ranks.steps[index])));
    const ms = this.by === "step" ? ranks.step_ms[index] : ranks.own_ms[index];
    if (!ms || !median) return "endfill";
    return Math.max(0, Math.min(4, Math.ceil((ms / median - 1.05) * 10)));
  }

  draw() {
    const now = this.now, width = this.canvas.parentElement.clientWidth;
    const count = now ? now.ranks.rank.length : 0;
    if (!count || !width) {
      this.canvas.height = 0;
      return;
    }
    let cell = CELL_MAX;
    while (cell > 3 && Math.ceil(count / Math.floor(width / cell)) * cell > HEIGHT_MAX) cell -= 1;
    this.cell = cell;
    this.columns = Math.max(1, Math.floor(width / cell));
    const height = Math.ceil(count / this.columns) * cell, scale = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const ranks = now.ranks, gap = cell > 6 ? 2 : cell > 4 ? 1 : 0.5;
    const most = ranks.steps.reduce((one, other) => Math.max(one, other), 0);
    const values = (this.by === "own" ? ranks.own_ms : ranks.step_ms).filter((each) => each > 0).sort((a, b) => a - b);
    const median = values.length ? values[values.length >> 1] : 0;
    const byFill = new Map();  // one colour after the other: setting a colour costs more than a rectangle
    for (let index = 0; index < count; index += 1) {
      const standing = now.standing[ranks.rank[index]];
      const fill = this.by === "stage"
        ? (standing ? (standing[0] === "hung" ? "badfill" : "hungfill") : STAGE_FILL[ranks.stage[index]])
        : this.fillOf(index, ranks, most, median);
      const name = typeof fill === "number" ? SCALE[fill] : fill;
      if (!byFill.has(name)) byFill.set(name, []);
      byFill.get(name).push(index);
    }
    for (const [name, indices] of byFill) {
      context.fillStyle = colour(name);
      for (const index of indices) {
        context.globalAlpha = this.node < 0 || ranks.node[index] === this.node ? 1 : 0.15;
        context.fillRect((index % this.columns) * cell, Math.floor(index / this.columns) * cell, cell - gap, cell - gap);
      }
    }
    context.globalAlpha = 1;
    if (cell >= NUMBERED_MIN) {
      context.fillStyle = colour("onfill");
      context.font = "600 12px system-ui, sans-serif";
      context.textAlign = "center";
      for (let index = 0; index < count; index += 1) {
        context.fillText(ranks.rank[index], ((index % this.columns) + 0.5) * cell - gap / 2, (Math.floor(index / this.columns) + 0.5) * cell + 3);
      }
    }
    context.strokeStyle = colour("ink");
    const outline = (index, lineWidth) => {
      context.lineWidth = lineWidth;
      context.strokeRect((index % this.columns) * cell + lineWidth / 2, Math.floor(index / this.columns) * cell + lineWidth / 2,
        cell - gap - lineWidth, cell - gap - lineWidth);
    };
    for (const [rank, [standing]] of Object.entries(now.standing)) {
      if (standing === "hung") outline(ranks.rank.indexOf(Number(rank)), Math.max(1.5, Math.min(3, cell / 6)));
    }
    if (this.pointed >= 0 && this.pointed < count) outline(this.pointed, 2);
    this.canvas.setAttribute("aria-label", this.summary());
  }

  summary() {
    const counts = {};
    for (const letter of this.now.ranks.stage) counts[letter] = (counts[letter] ?? 0) + 1;
    const hung = Object.entries(this.now.standing).filter(([, [standing]]) => standing === "hung").map(([rank]) => rank);
    const stages = Object.entries(counts).map(([letter, count]) => `${count} ${STAGES[letter]}`).join(", ");
    return `${plural(this.now.ranks.rank.length, "rank")}: ${stages}${hung.length ? `; hung: rank ${hung.join(", ")}` : ""}`;
  }

  /** What the colours mean now. */
  keys() {
    const key = (name, text) => h("li", {}, h("span", { class: `key ${name}` }), text);
    if (this.by === "stage") {
      const used = new Set(this.now ? this.now.ranks.stage : "");
      const hung = this.now && Object.keys(this.now.standing).length > 0;
      return [
        [...used].some((each) => "sm".includes(each)) && key("startup", "starting, meeting"),
        used.has("g") && key("down", "forming the group"),
        used.has("r") && key("cold", "ready, no step yet"),
        used.has("t") && key("training", "stepping"),
        used.has("w") && key("cold", "spare"),
        used.has("d") && key("end", "done"),
        hung && key("lost", "hung (outlined)"),
        hung && key("hung", "waits for it"),
      ];
    }
    const words = this.by === "lag" ? ["no step behind", "1", "2–3", "4–7", "8 or more"] : ["median", "+5 to 15 %", "+15 to 25 %", "+25 to 35 %", "more"];
    return ["training", "cold", "startup", "down", "lost"].map((name, index) => key(name, words[index]));
  }
}

// The live log: lines of the workers on the dashboard's machine, merged, filtered and searched there.

import { bytes, fill, h } from "./dom.js";

const LINES_MAX = 3000;
const TYPING_MS = 300;  // without a key: then the search begins
const COLOURS = { 1: "a1", 2: "a2", 31: "a31", 32: "a32", 33: "a33", 34: "a34", 35: "a35", 36: "a36" };

/** The text of a line with the basic colours of terminals: they change only how it looks. */
export function coloured(text) {
  const found = [];
  let styles = [];
  text.split(/\u001b\[([0-9;:]*)m/).forEach((part, index) => {
    if (index % 2 === 0) {
      if (part) found.push(styles.length ? h("span", { class: styles.join(" ") }, part) : part);
      return;
    }
    const codes = part.split(/[;:]/).map(Number);
    while (codes.length) {
      const code = codes.shift(), hue = code >= 90 && code <= 97 ? code - 60 : code;
      if (code === 38 || code === 48) codes.splice(0, codes[0] === 5 ? 2 : 4);  // one of 256, or of 16 million
      else if (code === 0) styles = [];
      else if (hue >= 30 && hue <= 39) styles = styles.filter((each) => each.length < 3);
      else if (code === 22) styles = styles.filter((each) => each.length > 2);
      if (COLOURS[hue]) styles = [...styles, COLOURS[hue]];
    }
  });
  return found;
}

export class Logs {
  constructor() {
    this.box = h("div", { class: "log", tabindex: 0, role: "log", "aria-label": "Output of the workers" });
    this.ranks = h("input", { size: 8, placeholder: "all", "aria-label": "Ranks, for example 0-3" });
    this.generation = h("select", { "aria-label": "Generation" }, h("option", { value: "0" }, "newest"));
    this.text = h("input", { type: "search", placeholder: "search", "aria-label": "Search in the logs" });
    this.follow = h("input", { type: "checkbox", checked: true });
    this.note = h("p", { class: "dim small" });
    this.others = h("p", { class: "dim small" });
    this.files = h("details", {}, h("summary", {}, "whole files"), h("div", { class: "files" }));
    this.known = {};
    for (const field of [this.ranks, this.generation, this.text]) field.addEventListener("change", () => this.ask());
    this.text.addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.ask(), TYPING_MS);
    });
    document.addEventListener("visibilitychange", () => this.seen());
  }

  get elements() {
    return [
      h("div", { class: "head" }, h("h2", {}, "Logs"), h("label", {}, "ranks", this.ranks), h("label", {}, "generation", this.generation),
        this.text, h("label", {}, this.follow, "follow")),
      this.box, this.note, this.files, this.others,
    ];
  }

  /** Where the logs of the other nodes are. */
  elsewhere(now) {
    const newest = Object.keys(this.known).at(-1), here = new Set(this.known[newest] ?? []);
    const away = new Set(now.ranks.node.filter((_, place) => !here.has(now.ranks.rank[place])));
    const others = now.nodes.filter((_, index) => away.has(index));
    fill(this.others, others.map((node) => [node.host, node.ranks]), () => others.length > 0 && [
      `Only logs of this machine are shown. Elsewhere: ${others.slice(0, 8).map((node) => `ranks ${node.ranks} on ${node.host}`).join(", ")}${others.length > 8 ? " …" : ""}; \`holdfast logs\` shows them there.`]);
  }

  /** `known`: ranks by generation, of this machine. */
  update(known) {
    this.known = known;
    fill(this.generation, Object.keys(known), () => {
      const chosen = this.generation.value;
      return [h("option", { value: "0" }, "newest"), ...Object.keys(known).reverse().map((each) => h("option", { value: each, selected: each === chosen }, each))];
    });
    const newest = Object.keys(known).at(-1), generation = this.generation.value === "0" ? newest : this.generation.value;
    fill(this.files.lastChild, [generation, known[generation]], () => (known[generation] ?? []).map((rank) => h("div", {}, `rank ${rank}: `,
      ["stdout", "stderr"].map((stream) => [h("a", { href: `log/${generation}/${rank}/${stream}`, target: "_blank", rel: "noopener" }, stream), " "]))));
    if (!this.source) this.seen();
  }

  /** A browser keeps six connections to one host: a tab that nobody sees gives this one back. */
  seen() {
    if (document.hidden && this.follow.checked) this.source?.close();
    const closed = !this.source || (!this.ended && this.source.readyState === EventSource.CLOSED);
    if (!document.hidden && closed && Object.keys(this.known).length) this.open();
  }

  get wanted() {
    return new URLSearchParams({ ranks: this.ranks.value.trim(), generation: this.generation.value, text: this.text.value }).toString();
  }

  /** The fields may say something else now. */
  ask() {
    clearTimeout(this.typing);
    if (this.wanted !== this.asked) this.open();
  }

  /** Show what this rank wrote in this generation, at its newest error. */
  jump(rank, generation) {
    this.ranks.value = rank;
    this.generation.value = String(generation);
    this.text.value = "";
    this.follow.checked = false;
    this.jumps = true;
    this.open();
    this.box.scrollIntoView({ block: "center" });
    this.box.focus({ preventScroll: true });
  }

  open() {
    this.source?.close();
    this.box.replaceChildren();
    this.note.textContent = "";
    this.shown = undefined;
    this.ended = false;
    this.asked = this.wanted;
    this.source = new EventSource(`logs?${this.asked}`);
    this.source.addEventListener("end", () => {  // the job has ended, and this was all
      this.ended = true;
      this.source.close();
      if (!this.box.childElementCount) this.note.textContent = "No such lines.";
    });
    this.source.onopen = () => this.box.replaceChildren();  // after a lost connection everything is sent again
    this.source.onmessage = (event) => this.take(JSON.parse(event.data));
    this.source.onerror = () => {
      if (this.over) {  // the dashboard has ended with the job
        this.ended = true;
        this.source.close();
        return;
      }
      if (this.source.readyState === EventSource.CLOSED) this.note.textContent = "ranks are written like 3, 0-7 or 1,5";
    };
    this.update(this.known);
  }

  take(news) {
    if (this.shown !== news.generation) {
      this.shown = news.generation;
      this.box.append(h("div", {}, h("span", {}), h("span", { class: "dim" }, `generation ${news.generation}`)));
    }
    const lines = news.lines.map(([rank, stream, text, level]) => h("div", { class: `${stream} ${level}` }, h("span", { title: stream }, rank), h("span", {}, coloured(text))));
    this.box.append(...lines);
    while (this.box.childElementCount > LINES_MAX) this.box.firstChild.remove();
    if (this.follow.checked) this.box.scrollTop = this.box.scrollHeight;
    if (this.jumps) {
      this.jumps = false;
      const last = lines.findLastIndex((line) => line.classList.contains("error"));
      const first = lines[lines.findLastIndex((line, index) => index <= last && !line.classList.contains("error")) + 1];
      this.box.scrollTop = last < 0 ? this.box.scrollHeight : first.offsetTop - this.box.offsetTop;
    }
    const left = [news.left_out && `${news.left_out} more lines at once`, news.bytes_left_out && `${bytes(news.bytes_left_out)} that came too fast`, news.files_left_out && `${news.files_left_out} more files`].filter(Boolean);
    if (left.length) this.note.textContent = `Not shown: ${left.join(", ")}. The whole files have them.`;
  }
}

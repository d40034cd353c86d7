// The live log: lines of the workers on the dashboard's machine, merged, filtered and searched there.

import { bytes, fill, h } from "./dom.js";

const LINES_MAX = 3000;

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
    for (const field of [this.ranks, this.generation, this.text]) field.addEventListener("change", () => this.open());
    this.text.addEventListener("search", () => this.open());
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
    const others = now.nodes.filter((_, index) => now.ranks.rank.some((rank, place) => now.ranks.node[place] === index && !here.has(rank)));
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
    const closed = !this.source || this.source.readyState === EventSource.CLOSED;
    if (!document.hidden && closed && Object.keys(this.known).length) this.open();
  }

  open() {
    this.source?.close();
    this.box.replaceChildren();
    this.note.textContent = "";
    const asked = new URLSearchParams({ ranks: this.ranks.value.trim(), generation: this.generation.value, text: this.text.value });
    this.source = new EventSource(`logs?${asked}`);
    this.source.onopen = () => this.box.replaceChildren();  // after a lost connection everything is sent again
    this.source.onmessage = (event) => this.take(JSON.parse(event.data));
    this.source.onerror = () => {
      if (this.source.readyState === EventSource.CLOSED) this.note.textContent = "ranks are written like 3, 0-7 or 1,5";
    };
    this.update(this.known);
  }

  take(news) {
    if (this.shown !== news.generation) {
      this.shown = news.generation;
      this.box.append(h("div", {}, h("span", {}), h("span", { class: "dim" }, `generation ${news.generation}`)));
    }
    const lines = news.lines.map(([rank, stream, text]) => h("div", { class: stream }, h("span", {}, rank), h("span", {}, text)));
    this.box.append(...lines);
    while (this.box.childElementCount > LINES_MAX) this.box.firstChild.remove();
    if (this.follow.checked) this.box.scrollTop = this.box.scrollHeight;
    const left = [news.left_out && `${news.left_out} more lines at once`, news.bytes_left_out && `${bytes(news.bytes_left_out)} that came too fast`, news.files_left_out && `${news.files_left_out} more files`].filter(Boolean);
    if (left.length) this.note.textContent = `Not shown: ${left.join(", ")}. The whole files have them.`;
  }
}

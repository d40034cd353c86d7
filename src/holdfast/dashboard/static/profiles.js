// Profiles: a form that asks for one, the operations of the newest, and links to all files.

import { clock, fill, h, milliseconds, table } from "./dom.js";

export class Profiles {
  /** `act(what, more)`: passes an action on; null: it failed, and the error is shown. */
  constructor(act) {
    this.act = act;
    this.ranks = h("input", { size: 6, value: "0", required: true, "aria-label": "Ranks to profile, for example 0-3" });
    this.amount = h("input", { type: "number", min: 1, max: 300, value: 5, "aria-label": "How many steps or seconds" });
    this.unit = h("select", { "aria-label": "Steps or seconds" }, h("option", { value: "steps" }, "steps"), h("option", { value: "for_s" }, "seconds"));
    this.button = h("button", { type: "submit" }, "Profile");
    this.said = h("p", { role: "status" });
    this.newest = h("div");
    this.files = h("div", {}, h("p", { class: "dim" }, "torch's profiler around the next steps, and py-spy where it is installed. The ranks run a little slower meanwhile."));
  }

  get elements() {
    const form = h("form", { class: "row" }, h("label", {}, "ranks", this.ranks), this.amount, this.unit, this.button);
    form.addEventListener("submit", (event) => { event.preventDefault(); this.take(); });
    return [h("div", { class: "head" }, h("h2", {}, "Profiles")), form, this.said, this.newest, this.files];
  }

  async take() {
    this.button.disabled = true;
    this.said.textContent = `Waiting for ${this.amount.value} ${this.unit.selectedOptions[0].textContent} of ranks ${this.ranks.value} …`;
    const told = await this.act("profile", { ranks: this.ranks.value, [this.unit.value]: Number(this.amount.value) });
    this.button.disabled = false;
    this.said.textContent = "";
    if (told) this.show(told);
  }

  show(told) {
    const first = told.ranks.find((each) => each.operations.length);
    fill(this.newest, told, () => [
      first && h("h3", {}, `Rank ${first.rank}: the most expensive operations`),
      first && table([["own time", "number"], ["with calls", "number"], ["calls", "number"], "operation"],
        first.operations.map(([name, calls, own, total]) => [[milliseconds(own * 1e3), "number"], [milliseconds(total * 1e3), "number"], [calls, "number"], [name, "words"]]), "The most expensive operations"),
      told.ranks.map((each) => [each.why, each.note].filter(Boolean).map((problem) => h("p", {}, `rank ${each.rank} on ${each.host}: ${problem}`))),
      told.silent.map((host) => h("p", {}, `${host} did not answer.`))]);
  }

  /** `taken`: the profiles of this machine's ranks. */
  update(taken) {
    if (taken.length) fill(this.files, taken, () => h("ul", { class: "plain small" }, taken.toReversed().map((each) => h("li", {}, `${clock(each.at)} rank ${each.rank}: `,
      each.files.map((file) => [h("a", { href: `profile/${each.name}/${file}`, target: "_blank", rel: "noopener" }, file.slice(file.indexOf(".") + 1)), " "]), each.why && h("span", { class: "dim" }, each.why)))));
  }
}

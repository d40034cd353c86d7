// Elements from data. Text is always text: nothing that a worker, a file or a host name contains becomes markup.

const SVG = "http://www.w3.org/2000/svg";
const IN_SVG = new Set(["svg", "rect", "title"]);

/** An element. Properties that begin with "on" are listeners; null, undefined and false are left out. */
export function h(tag, properties = {}, ...children) {
  const made = IN_SVG.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "open") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return made;
}

/** Replace the content of an element, only if `key` has changed since the last time: what somebody reads stays. */
export function fill(element, key, make) {
  const text = JSON.stringify(key) ?? "";
  if (element.filledWith === text) return;
  element.filledWith = text;
  element.replaceChildren(...[make()].flat(Infinity).filter(Boolean));
}

export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  const whole = Math.round(seconds), pair = (big, name, small, unit) => `${big} ${name} ${small} ${unit}`;
  if (whole < 3600) return pair(Math.floor(whole / 60), "min", whole % 60, "s");
  if (whole < 86400) return pair(Math.floor(whole / 3600), "h", Math.floor((whole % 3600) / 60), "min");
  return pair(Math.floor(whole / 86400), "d", Math.floor((whole % 86400) / 3600), "h");
}

export const plural = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
/** `ranks 0-2, 5 wait in all_reduce`, from ranks and the place of each. */
export function placed(ranks, place) {
  const spans = [];
  for (const rank of [...ranks].sort((one, other) => one - other)) {
    if (spans.length && spans.at(-1)[1] === rank - 1) spans.at(-1)[1] = rank;
    else spans.push([rank, rank]);
  }
  const words = ranks.length > 1 ? place.replace(/^waits /, "wait ").replace(/^is /, "are ") : place;
  return `rank${ranks.length > 1 ? "s" : ""} ${spans.map(([first, last]) => (first === last ? first : `${first}-${last}`)).join(", ")} ${words}`;
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
export const date = (seconds) => new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
export const milliseconds = (ms) => (ms === null || ms === undefined ? "–" : ms >= 10000 ? `${(ms / 1000).toPrecision(3)} s` : `${+ms.toPrecision(3)} ms`);
export const bytes = (count) => {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (count >= size) return `${(count / size).toPrecision(3)} ${unit}`;
  }
  return `${count} B`;
};
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Rows of a table. A cell is text, an element, or [text or element, class]. */
export function table(headings, rows, label) {
  const cell = (tag, content) => (!content && content !== 0 ? h(tag) : Array.isArray(content) ? h(tag, { class: content[1] }, content[0]) : h(tag, {}, content));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    h("table", {},
      h("thead", {}, h("tr", {}, headings.map((each) => cell("th", each)))),
      h("tbody", {}, rows.map((row) => (row instanceof Node ? row : h("tr", {}, row.map((each) => cell("td", each))))))));
}

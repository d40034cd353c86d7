// The pages: the list of jobs, and one job. Data comes as server-sent events: `now` (once a second), `story`, `curve`;
// after `end` nothing is asked any more.
// A page that was written to a file has them in an element, and shows what was known then.

import { Chart } from "./charts.js";
import { bytes, clock, date, duration, fill, h, milliseconds, placed, plural, table } from "./dom.js";
import { Grid } from "./grid.js";
import { Logs } from "./logs.js";
import { Profiles } from "./profiles.js";

const main = document.getElementById("main");
const link = document.getElementById("link");
const SILENT_S = 5;
const NEWS_S = 900;  // so long a failure that was answered by a restart is shown at the top
const NODES_MAX = 100;  // rows; those that do not run come first
const LOADS_S = 10, LOAD_NODES_MAX = 64, LOAD_POINTS_MAX = 400;  // the curves of loads in this page
const PHASES = ["detect", "stop", "form", "spawn", "import", "store", "process_group", "first_step"];
const DOING = { startup: "start-up", training: "training", lost: "lost work", hung: "hanging", down: "down", end: "end" };

// --- theme -------------------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const remembered = () => { try { return localStorage.getItem("holdfast-theme"); } catch { return null; } };

function applyTheme() {
  document.documentElement.dataset.theme = remembered() ?? (dark.matches ? "dark" : "light");
  document.dispatchEvent(new Event("theme"));
}

dark.addEventListener("change", applyTheme);
document.getElementById("theme").addEventListener("click", () => {
  const chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("holdfast-theme", chosen); } catch { /* a file: nothing is kept */ }
  applyTheme();
  document.documentElement.dataset.theme = chosen;
  document.dispatchEvent(new Event("theme"));
});
applyTheme();

// --- what is the matter: one look ---------------------------------------------------------------------------------------

const ENDS = {
  succeeded: ["good", "Succeeded"], failed: ["bad", "Failed"], preempted: ["busy", "Preempted"], signalled: ["busy", "Stopped"],
  refused: ["bad", "Refused"], no_quorum: ["bad", "Too few nodes"],
};

/** [class, words, explanation] */
function judge({ now, story, lost, saved }) {
  const end = story?.outcome;
  if (end) {
    const exit = `exit code ${end.exit_code}`;
    return [...(ENDS[end.kind] ?? ["busy", end.kind]), end.message ? `${end.message}; ${exit}` : exit];
  }
  if (story?.end && (saved || now?.ended)) {  // of the journal; the file with the outcome is missing
    const [kind, ...rest] = story.end.split(", ");
    return [...(ENDS[kind] ?? ["busy", kind]), rest.join(", ")];
  }
  if (now?.ended) return ["busy", "Ended", "no outcome was written: the agent was killed, or its node was lost"];
  if (saved) return ["busy", "Not ended", "when this page was written"];
  if (lost) return ["bad", "No connection", "the dashboard does not answer; this is what was known last"];
  if (!now) return ["busy", "Connecting", ""];
  if (now.waiting) return ["busy", "Waiting", "for the agent of this job"];
  if (now.silent) return ["bad", "No answer", now.silent];
  const hung = Object.values(now.standing).some(([standing]) => standing === "hung");
  if (hung) return ["bad", "Hanging", ""];
  const stages = new Set(now.ranks.stage), steps = stages.has("t");
  const words = {
    gathering: ["busy", "Waiting for nodes", now.why], preparing: ["busy", "Starting", now.why], regrouping: ["busy", "Regrouping", now.why],
    draining: ["busy", "Draining", "workers go to their next safe point and save"], stopping: ["busy", "Restarting", now.why], over: ["busy", "Ending", now.why],
    running: steps ? ["good", "Training", now.spares_why] : !stages.size && now.world_size ? ["busy", "Running", now.notices[0] ?? "the ranks are not known"]
      : ["busy", "Starting", stages.has("r") || !stages.size ? "no step yet" : "workers import, and form their group"],
  };
  const found = words[now.phase] ?? ["busy", now.phase, ""];
  return now.notices.length && found[0] === "good" ? ["busy", "Training, with a notice", ""] : found;
}

// --- one job -----------------------------------------------------------------------------------------------------------

class JobPage {
  constructor(saved) {
    this.saved = saved;
    this.now = null;
    this.story = null;
    this.curve = [];
    this.load_curves = {};
    this.lost = false;
    this.chosen = 0;
    this.make();
    if (saved) {
      this.take("story", saved.story);
      link.textContent = `as of ${date(saved.at)}`;
    } else {
      this.connect();
      this.clock = setInterval(() => this.checkLink(), 1000);
    }
  }

  make() {
    const left = h("div", { class: "column" }), right = h("div", { class: "column" });
    const sectionIn = (place) => (name, title, ...more) => {
      const made = h("section", { "aria-label": title, id: name, hidden: true }, ...more);
      place.append(made);
      return made;
    };
    const wide = sectionIn(main), onLeft = sectionIn(left), onRight = sectionIn(right);
    this.state = h("div", { class: "state", role: "status" });
    this.tiles = h("dl", { class: "tiles" });
    wide("state", "Is it training", this.state, this.tiles);
    this.problem = wide("verdict", "What went wrong");
    this.problem.classList.add("problem");
    this.timeline = wide("timeline", "Timeline", h("h2", {}, "Timeline"), this.bars = h("div", { class: "bars" }), this.generations = h("div"), this.telling = h("div"));
    main.append(h("div", { class: "columns" }, left, right));
    const canvas = h("canvas", { id: "grid", tabindex: 0, role: "img", "aria-label": "ranks" }), pointed = h("p", { class: "pointed", "aria-live": "polite" });
    const holder = h("div", {}, canvas);
    this.grid = new Grid(canvas, pointed);
    this.colour = h("select", {}, [["stage", "stage"], ["lag", "steps behind"], ["step", "step time"], ["own", "own part of a step"]].map(([value, text]) => h("option", { value }, text)));
    this.node = h("select", {}, h("option", { value: "-1" }, "all"));
    this.keys = h("ul", { class: "keys" });
    this.ranks = onLeft("ranks", "Ranks", h("div", { class: "head" }, h("h2", {}, "Ranks"), h("label", {}, "colour", this.colour), h("label", {}, "node", this.node)), holder, this.keys, pointed);
    this.colour.addEventListener("change", () => { this.grid.by = this.colour.value; this.grid.draw(); this.showKeys(); });
    this.node.addEventListener("change", () => { this.grid.node = Number(this.node.value); this.node_host = this.full?.nodes[this.grid.node]?.host; this.grid.draw(); });
    this.steps = onRight("steps", "Step times", h("h2", {}, "Step times"), this.plot = h("div", { class: "chart" }), this.shares = h("div"), this.slowest = h("div"));
    this.metric = h("select", { onchange: () => this.showMetrics() });
    this.metrics = onRight("metrics", "Metrics", h("div", { class: "head" }, h("h2", {}, "Metrics"), h("label", {}, "metric", this.metric)), this.newestMetric = h("p"), h("div", { class: "chart" }),
      h("p", { class: "dim small" }, "As given to snaps.step(), at each snapshot on disk."));
    this.sample = h("button", { type: "button", onclick: () => this.stacks() }, "Sample now");
    this.progress = onLeft("progress", "Progress", h("h2", {}, "Steps done"), h("div", { class: "chart" }));
    this.stacksSection = onRight("stacks", "Stacks", h("div", { class: "head" }, h("h2", {}, "Stacks"), this.sample), this.groups = h("div", {}, h("p", { class: "dim" }, "Where every rank is, equal stacks once.")));
    this.profiles = new Profiles((what, more) => this.act(what, more));
    this.profileSection = onRight("profiles", "Profiles", this.profiles.elements);
    this.nodes = onLeft("nodes", "Nodes", h("h2", {}, "Nodes"), this.nodeTable = h("div"), this.loadTable = h("div"), this.loadCourse = h("div", { hidden: true },
      h("div", { class: "head" }, h("h3", {}, "Load over time"), h("label", {}, "node", this.loadNode = h("select", { onchange: () => this.showLoad() }))), h("div", { class: "chart" })));
    this.opened = new Set();
    this.snapshots = onLeft("snapshots", "Snapshots");
    this.logs = new Logs();
    this.logSection = wide("logs", "Logs", this.logs.elements);
    this.trace = h("div");
    this.actions = onLeft("actions", "Actions", h("h2", {}, "Actions"), h("div", { class: "row actions" }, this.buttons()), this.answer = h("p", { role: "status" }), this.trace);
    this.happened = onRight("happened", "What happened");
    document.addEventListener("theme", () => { this.grid.draw(); for (const each of [this.chart, this.course, this.loadChart, this.metricChart]) each?.repaint(); });
  }

  connect() {
    const source = this.source = new EventSource("events");
    for (const kind of ["now", "story", "curve", "load_curves"]) source.addEventListener(kind, (event) => this.take(kind, JSON.parse(event.data)));
    source.addEventListener("end", () => {
      source.close();
      clearInterval(this.clock);
      this.checkLink();
      this.logs.over = true;
    });
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED && !this.story?.outcome) setTimeout(() => this.connect(), 3000);
    };
  }

  checkLink() {
    const silent = this.heard === undefined ? 0 : (performance.now() - this.heard) / 1000;
    const ended = this.now?.ended;
    const lost = !ended && silent > SILENT_S;
    link.classList.toggle("lost", lost);
    link.textContent = ended ? "ended" : lost ? `no data for ${duration(silent)}` : this.now ? "live" : "connecting";
    if (lost !== this.lost) {
      this.lost = lost;
      this.showState();
    }
  }

  take(kind, data) {
    this.heard = performance.now();
    this[kind] = data;
    if (kind === "now") this.takeNow(data);
    if (kind === "curve" && this.chart) this.chart.set(data);
    if (kind === "load_curves") this.showLoad();
    if (kind === "story") this.showStory();
    this.showState();
    this.showProblem();
  }

  takeNow(now) {
    for (const each of this.actions.querySelectorAll("button")) each.disabled = Boolean(now.ended);
    if (!now.ranks || (this.full && !now.world_size)) return;  // the agent's last answer says nothing of the job
    this.full = now;
    this.ranks.hidden = !now.ranks.rank.length;
    this.grid.since = this.since;
    fill(this.node, now.nodes.map((node) => node.host), () => {
      this.grid.node = now.nodes.findIndex((node) => node.host === this.node_host);  // -1: all
      return [h("option", { value: "-1" }, "all"), ...now.nodes.map((node, index) => h("option", { value: String(index), selected: index === this.grid.node }, node.host))];
    });
    this.grid.update(now);
    this.showKeys();
    if (now.median_ms !== null) {
      this.steps.hidden = false;
      if (!this.chart && window.uPlot) {
        this.chart = new Chart(this.plot, [["median", "c0", milliseconds], ["99th percentile", "c6", milliseconds], ["own part", "c5", milliseconds]]);
        this.chart.set(this.curve);
      }
      if (this.chart) this.chart.add([now.at, now.median_ms, now.p99_ms, now.own_ms, now.steps_s]);
    }
    this.showSteps(now);
    this.showNodes(now);
    this.addLoads(now);
    this.stacksSection.hidden = this.profileSection.hidden = this.actions.hidden = false;
    this.logs.elsewhere(now);
  }

  showKeys() {
    fill(this.keys, [this.grid.by, [...new Set(this.grid.now?.ranks.stage)], Object.keys(this.grid.now?.standing ?? {}).length], () => this.grid.keys());
  }

  /** What steps are counted from, where it is not the begin of the job. */
  get since() {
    const number = this.full?.generation ?? this.story?.generations.at(-1)?.generation ?? 1;
    const anew = number > 1 && (this.full ?? this.story)?.counts_job === false;
    return anew ? `since the start of generation ${number}` : "";
  }

  // ------------------------------------------------------------- 1: is it training

  showState() {
    const [kind, words, why] = judge(this), now = this.full, story = this.story;
    main.querySelector("#state").hidden = false;
    this.state.className = `state ${kind}`;
    fill(this.state, [kind, words, why], () => [h("strong", { class: words.startsWith("Training") ? "pulse" : "" }, words), h("p", {}, why)]);
    const title = story?.run_id || now?.run_id || decodeURIComponent(location.pathname.split("/").at(-2) ?? "");
    document.getElementById("title").textContent = title;
    document.title = `${words} · ${title} · holdfast`;
    const past = story?.history, ended = this.now?.ended || story?.outcome || this.saved;
    const last = past?.stretches.length ? past.stretches.at(-1).to_epoch_s - past.stretches[0].from_epoch_s : null;
    const share = now && !ended ? (now.job_s > 0 ? Math.min(1, now.training_s / now.job_s) : null) : past?.effective;
    const rows = [
      ["step", ended ? story?.curve.at(-1)?.[1] : now?.step || null, this.since],
      ["of the whole job", !ended && now?.job_steps ? `${Math.floor(100 * Math.min(1, now.job_step / now.job_steps))} %` : null, now?.job_steps ? `${now.job_step} of ${plural(now.job_steps, "step")}` : ""],
      ["time left", !ended && now?.left_s ? duration(now.left_s) : null, "at the present rate"],
      ["steps per second", !ended && now?.steps_s ? +now.steps_s.toPrecision(3) : null],
      ["last step", !ended ? now?.last_step || null : null],
      ["effective training time", share !== null && share !== undefined ? `${Math.round(share * 100)} %` : null, `of ${duration(now && !ended ? now.job_s : last ?? 0)}`],
      ["ranks", now && !ended ? now.world_size || null : story?.generations.at(-1)?.world_size, now && !ended ? `on ${plural(now.nodes.filter((node) => node.group_rank !== null).length, "node")}` : ""],
      ["generation", now?.generation ?? story?.generations.at(-1)?.generation],
      ["restarts", now ? `${now.restarts} of ${now.restarts_max}` : null],
      ["steps lost to restarts", past?.lost_steps || null],
    ].filter(([, value]) => value !== null && value !== undefined);
    fill(this.tiles, rows, () => rows.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value), more && h("small", {}, more)))));
  }

  // ------------------------------------------------------------- 6: the verdict

  showProblem() {
    const end = this.story?.outcome, verdict = end?.verdict, now = this.now;
    const hung = now?.standing && Object.values(now.standing).some(([standing]) => standing === "hung");
    const newest = this.story?.incidents.findLast((each) => each.what === "failure");
    this.problem.classList.toggle("busy", !end && !hung);
    if (verdict) {
      this.problem.hidden = false;
      fill(this.problem, end, () => this.verdictParts(verdict));
    } else if (!end && (hung || now?.notices?.length)) {
      const story = this.story?.incidents.findLast((each) => each.groups.length);
      this.problem.hidden = false;
      fill(this.problem, [now.notices, hung, story], () => [
        h("h2", {}, hung ? "The job hangs" : "Notice"), now.notices.map((text) => h("p", {}, text)),
        hung && story && h("ul", { class: "plain" }, story.groups.map(([ranks, place]) => h("li", {}, placed(ranks, place)))),
        hung && story && h("p", {}, this.logOf(story)),
        this.advice(hung ? story?.code : this.story?.incidents.findLast((each) => each.what === "straggler")?.code),
      ]);
    } else if (!end && newest && newest.at_s > (now?.at ?? 0) - NEWS_S) {
      this.problem.hidden = false;
      fill(this.problem, [newest, this.story.logs[newest.generation]], () => [
        h("h2", {}, `${newest.code}: generation ${newest.generation} ended at ${clock(newest.at_s)}, and the job goes on`), h("p", {}, newest.text, " ", this.logOf(newest)),
        newest.advice ? h("p", { class: "do" }, h("b", {}, "Do: "), newest.advice) : this.advice(newest.code)]);
    } else {
      this.problem.hidden = true;
    }
  }

  /** Leads to what this rank wrote in this generation; null: its log is not here. */
  toLog(rank, generation) {
    if (this.saved || !this.story.logs[generation]?.includes(rank)) return null;
    return h("button", { type: "button", class: "quiet linked", onclick: () => this.logs.jump(rank, generation) }, `log of rank ${rank}`);
  }

  /** The same for an incident: of the worker that it is about, of the first one that failed in its generation, or of a
      rank that hangs. */
  logOf(incident) {
    const failed = incident.what === "failure" ? this.story.incidents.find((each) => each.rank >= 0 && each.generation === incident.generation) : incident;
    const rank = failed?.rank >= 0 ? failed.rank : failed?.groups[0]?.[0][0];
    return rank === undefined ? null : this.toLog(rank, failed.generation);
  }

  advice(code) {
    const text = this.story?.advice?.[code];
    return text && h("p", { class: "do" }, h("b", {}, "Do: "), text, h("span", { class: "dim" }, ` (${code})`));
  }

  verdictParts(verdict) {
    const culprit = verdict.culprit ?? verdict.noticed_by, others = verdict.collateral ?? [];
    const words = (culprit?.traceback || culprit?.stderr_tail || culprit?.stdout_tail || "").trimEnd();
    const log = culprit && this.story.logs[verdict.generation]?.includes(culprit.rank);
    return [
      h("h2", {}, `${verdict.code}: ${verdict.cause}`),
      verdict.advice ? h("p", { class: "do" }, h("b", {}, "Do: "), verdict.advice) : this.advice(verdict.code),
      culprit && h("p", { class: "small" }, `${verdict.culprit ? "First" : "Noticed by"}: rank ${culprit.rank} (local ${culprit.local_rank}, pid ${culprit.pid}) on ${culprit.host}, `,
        culprit.exit_code < 0 ? `signal ${-culprit.exit_code}` : `exit code ${culprit.exit_code}`, culprit.started ? `, after ${duration(culprit.lived_s)}` : "", `, generation ${verdict.generation}. `,
        log && !this.saved && [this.toLog(culprit.rank, verdict.generation), " · "],
        log && !this.saved && h("a", { href: `log/${verdict.generation}/${culprit.rank}/stderr`, target: "_blank", rel: "noopener" }, "its stderr")),
      verdict.lost_nodes?.length ? h("p", { class: "small" }, `Lost: ${verdict.lost_nodes.join(", ")}`) : null,
      verdict.gave_up && h("p", { class: "small" }, `No restart: ${verdict.gave_up}`),
      words && h("pre", { tabindex: 0, "aria-label": "its last output" }, words),
      others.length > 0 && h("details", {}, h("summary", {}, `because of it: ${plural(others.length, "other rank")}`),
        h("ul", { class: "plain small" }, others.map((each) => h("li", {}, `rank ${each.rank} on ${each.host}: ${(each.message || (each.exit_code < 0 ? `signal ${-each.exit_code}` : `exit code ${each.exit_code}`)).split("\n")[0]}`)))),
      h("p", { class: "dim small" }, `\`holdfast explain ${verdict.code}\` says more.`),
    ];
  }

  // ------------------------------------------------------------- 2: timeline

  showStory() {
    const story = this.story;
    this.timeline.hidden = !story.history?.stretches.length && !story.generations.length;
    fill(this.bars, [story.history?.stretches, story.lives], () => [this.bar(story.history), this.nodeBars(story)]);
    fill(this.generations, [story.generations, this.chosen], () => this.generationTable(story));
    fill(this.telling, [this.chosen, story.generations, story.incidents], () => this.tell(story));
    this.happened.hidden = !story.incidents.length;
    fill(this.happened, [story.incidents, story.logs], () => [h("h2", {}, "What happened"), table(["when", ["gen", "number"], "what", "details"],
      story.incidents.toReversed().map((each) => [clock(each.at_s), [each.generation || "", "number"], h("span", {}, each.what, each.code && h("div", { class: "dim" }, each.code)),
        [h("span", {}, each.text, " ", this.logOf(each), each.advice && h("div", { class: "dim" }, each.advice),
          each.files?.map(([rank, path]) => h("div", { class: "dim" }, `stacks of rank ${rank}: ${path}`))), "words"]]), "What happened, newest first")]);
    if (!this.saved) {
      this.logSection.hidden = !Object.keys(story.logs).length;
      this.logs.update(story.logs);
      this.profiles.update(story.profiles ?? []);
      this.profileSection.hidden &&= !story.profiles?.length;
    }
    this.showSnapshots(story);
    this.showMetrics();
    fill(this.trace, story.actions, () => (story.actions.length ? [h("ul", { class: "plain small" }, story.actions.toReversed().map((each) => h("li", {}, `${clock(each.at)} ${each.what}: ${each.by}`)))] : [h("p", { class: "dim small" }, "Every action is an event in events.jsonl, with its origin.")]));
    if (story.actions.length) this.actions.hidden = false;
    for (const each of this.actions.querySelectorAll("button")) each.hidden = Boolean(this.saved);
    this.progress.hidden = story.curve.length < 2;
    if (!this.progress.hidden && window.uPlot) {
      this.course ??= new Chart(this.progress.lastChild, [["step", "c0", (value) => value.toLocaleString("en")]]);
      this.course.set(story.curve);
    }
  }

  bar(history) {
    const stretches = history?.stretches ?? [];
    if (!stretches.length) return [];
    const from = stretches[0].from_epoch_s, to = stretches.at(-1).to_epoch_s, scale = 1000 / Math.max(to - from, 1e-9);
    const svg = h("svg", { viewBox: "0 0 1000 30", preserveAspectRatio: "none", role: "img", "aria-label": "How the time was spent; the table below says the same" },
      stretches.filter((each) => each.to_epoch_s > each.from_epoch_s).map((each) => h("rect", {
        class: each.doing, x: ((each.from_epoch_s - from) * scale).toFixed(2), y: 0, height: 30, width: Math.max((each.to_epoch_s - each.from_epoch_s) * scale, 1).toFixed(2),
        onclick: () => this.choose(each.generation),
      }, h("title", {}, `${DOING[each.doing]}, generation ${each.generation}: ${duration(each.to_epoch_s - each.from_epoch_s)}`))));
    return [svg, h("div", { class: "axis" }, h("span", {}, date(from)), h("span", {}, clock(to))),
      h("ul", { class: "keys" }, Object.entries(DOING).filter(([name]) => history[`${name}_s`] > 0).map(([name, words]) => h("li", {}, h("span", { class: `key ${name}` }), `${words} ${duration(history[`${name}_s`])}`)))];
  }

  nodeBars(story) {
    const lives = Object.entries(story.lives ?? {}), stretches = story.history?.stretches;
    if (!stretches?.length || lives.length < 2) return [];
    const from = stretches[0].from_epoch_s, scale = 1000 / Math.max(stretches.at(-1).to_epoch_s - from, 1e-9);
    const block = (kind, begin, end, words) => end > begin && h("rect", { class: kind, x: ((begin - from) * scale).toFixed(2), y: 0, height: 30, width: Math.max((end - begin) * scale, 1).toFixed(2) }, h("title", {}, words));
    return h("details", {}, h("summary", {}, "each node"), lives.map(([node, own]) => [h("div", { class: "small dim" }, node),
      h("svg", { class: "thin", viewBox: "0 0 1000 30", preserveAspectRatio: "none", role: "img", "aria-label": `Generations of ${node}` }, own.map(([number, ordered, ready, over]) => {
        const begun = Math.min(ready ?? over, over);
        return [block("startup", ordered, begun, `generation ${number} starts: ${duration(begun - ordered)}`), block("training", begun, over, `generation ${number} trains: ${duration(over - begun)}`)];
      }))]));
  }

  generationTable(story) {
    if (!story.generations.length) return [];
    const failed = Object.fromEntries(story.incidents.filter((each) => each.what === "failure").map((each) => [each.generation, each.code]));
    if (story.outcome?.verdict) failed[story.outcome.verdict.generation] = story.outcome.verdict.code;
    const rows = story.generations.toReversed().map((each) => h("tr", { class: each.generation === this.chosen ? "chosen" : null },
      h("td", {}, h("button", { type: "button", class: "quiet", "aria-expanded": String(each.generation === this.chosen), onclick: () => this.choose(each.generation) }, `▸ ${each.generation}`)),
      h("td", {}, each.began_epoch_s ? clock(each.began_epoch_s) : ""), h("td", { class: "number" }, each.world_size || ""),
      h("td", { class: "number" }, each.total_s ? duration(each.total_s) : ""), h("td", {}, failed[each.generation] ? h("span", { class: "tag bad" }, failed[each.generation]) : ""),
      h("td", { class: "words" }, each.why || (each.generation === 1 ? "start" : ""))));
    return [h("h3", {}, "Generations"), table(["gen", "began", ["ranks", "number"], ["until step 1", "number"], "verdict", "why it began"], rows, "Generations, newest first")];
  }

  choose(number) {
    this.chosen = this.chosen === number ? 0 : number;
    this.showStory();
    if (this.chosen) this.telling.scrollIntoView({ block: "nearest" });
  }

  tell(story) {
    const each = story.generations.find((one) => one.generation === this.chosen);
    if (!each) return [];
    let at = 0;
    const scale = 1000 / Math.max(Object.values(each.phases_s).reduce((sum, seconds) => sum + seconds, 0), 1e-9);
    const blocks = PHASES.map((name, index) => {
      const seconds = each.phases_s[name] ?? 0, x = at * scale;
      at += seconds;
      return seconds > 0 && h("rect", { class: `p${index}`, x: x.toFixed(2), y: 0, height: 30, width: Math.max(seconds * scale, 1).toFixed(2) }, h("title", {}, `${name}: ${seconds.toFixed(3)} s`));
    });
    const own = story.incidents.filter((one) => one.generation === each.generation);
    return [h("h3", {}, `Generation ${each.generation}: ${each.why || "start"}`),
      at > 0 && h("div", { class: "bars" }, h("svg", { viewBox: "0 0 1000 30", preserveAspectRatio: "none", role: "img", "aria-label": "Phases of its start" }, blocks),
        h("ul", { class: "keys" }, PHASES.map((name, index) => each.phases_s[name] > 0 && h("li", {}, h("span", { class: `key p${index}` }), `${name.replace("_", " ")} ${each.phases_s[name].toFixed(2)} s`)))),
      h("ul", { class: "plain small" }, own.map((one) => h("li", {}, `${clock(one.at_s)} ${one.what}: ${one.text} `, this.logOf(one),
        one.groups.map(([ranks, place]) => h("div", { class: "dim" }, placed(ranks, place)))))),
      !own.length && h("p", { class: "dim small" }, "No incident.")];
  }

  // ------------------------------------------------------------- 4: steps

  showSteps(now) {
    const { ranks } = now;
    fill(this.shares, [now.median_ms, now.own_ms], () => {
      if (!now.median_ms || !now.own_ms) return [];
      const own = Math.min(1, now.own_ms / now.median_ms), text = `own part ${milliseconds(now.own_ms)} (data, forward), the rest ${milliseconds(now.median_ms - now.own_ms)} (backward, communication, waiting)`;
      return [h("div", { class: "bars" }, h("svg", { viewBox: "0 0 1000 30", preserveAspectRatio: "none", role: "img", "aria-label": text },
        h("rect", { class: "own", x: 0, y: 0, width: own * 1000, height: 30 }), h("rect", { class: "rest", x: own * 1000, y: 0, width: 1000 - own * 1000, height: 30 }))),
      h("ul", { class: "keys" }, h("li", {}, h("span", { class: "key own" }), `own part ${milliseconds(now.own_ms)}: data, forward`), h("li", {}, h("span", { class: "key rest" }), `rest ${milliseconds(now.median_ms - now.own_ms)}: backward, communication, waiting`))];
    });
    let worst = [];
    for (let index = 0; index < ranks.rank.length; index += 1) {
      if (ranks.own_ms[index] > 0 && (worst.length < 5 || ranks.own_ms[index] > worst.at(-1)[0])) {
        worst.push([ranks.own_ms[index], index]);
        worst = worst.sort((one, other) => other[0] - one[0]).slice(0, 5);
      }
    }
    fill(this.slowest, worst, () => worst.length > 1 && [h("h3", {}, "Largest own part"), table([["rank", "number"], "node", ["own part", "number"], ["against the median", "number"]],
      worst.map(([ms, index]) => [[ranks.rank[index], "number"], now.nodes[ranks.node[index]].host, [milliseconds(ms), "number"], [`× ${(ms / now.own_ms).toFixed(2)}`, "number"]]), "Ranks with the largest own part of a step")]);
  }

  // ------------------------------------------------------------- 5: stacks

  async stacks() {
    this.sample.disabled = true;
    const found = await this.act("stacks");
    this.sample.disabled = false;
    if (!found) return;
    fill(this.groups, found, () => [
      h("p", { class: "dim small" }, `${clock(found.at)}, generation ${found.generation}: ${plural(found.groups.reduce((sum, each) => sum + each.count, 0), "rank")} at ${plural(found.groups.length, "place")}`, found.whole ? "" : "; the coordinator does not answer: this node only"),
      found.groups.map((each, index) => h("details", { open: index < 3 }, h("summary", {}, h("b", {}, `rank${each.count > 1 ? "s" : ""} ${each.ranks}`), ` on ${each.hosts.length > 1 ? plural(each.hosts.length, "node") : each.hosts[0]}: ${each.place}`),
        h("pre", { tabindex: 0, "aria-label": `stack of ${each.ranks}` }, [...each.frames.filter(([, , own]) => own).map(([name, place]) => `${name}  ${place}`), ...each.source.map((line) => `> ${line}`), ...each.notes].join("\n")),
        each.frames.some(([, , own]) => !own) && h("details", { class: "small" }, h("summary", {}, "all frames"), h("pre", { tabindex: 0, "aria-label": "all frames" }, each.frames.map(([name, place]) => `${name}  ${place}`).join("\n"))))),
      found.missing.length > 0 && h("p", {}, `No answer in time from ${found.missing.join(", ")}.`)]);
  }

  // ------------------------------------------------------------- 7: nodes

  showNodes(now) {
    const excluded = (this.story?.excluded ?? []).filter((each) => each.at + each.for_s > now.at);
    const hosts = new Set(now.nodes.map((node) => node.host));  // to drain the only one would be to stop the job
    this.nodes.hidden = !now.nodes.length;
    const shown = now.nodes.toSorted((one, other) => (one.state === "running") - (other.state === "running")).slice(0, NODES_MAX);
    fill(this.nodeTable, [hosts.size > 1, shown.map((node) => ({ ...node, load: null, heard_s: Math.round(node.heard_s) })), excluded], () => [
      table(["node", "", "state", "ranks", ["step", "number"], ["steps/s", "number"], ["last step", "number"], ["agent heard", "number"]],
        shown.map((node) => [node.host, hosts.size > 1 && this.hostButtons(node.host), h("span", { class: `tag ${node.state === "running" ? "good" : node.group_rank === null ? "" : "busy"}` }, node.state), node.ranks, [node.step, "number"],
          [node.steps_s ? +node.steps_s.toPrecision(3) : "", "number"], [node.last_step, "number"], [`${duration(node.heard_s)} ago`, "number"]]), "Nodes"),
      now.nodes.length > shown.length && h("p", { class: "dim small" }, `and ${plural(now.nodes.length - shown.length, "node")} more${now.nodes.every((node) => shown.includes(node) || node.state === "running") ? " that run" : ""}`),
      excluded.map((each) => h("p", {}, h("span", { class: "tag bad" }, "excluded"), ` ${each.host} since ${clock(each.at)}, for ${duration(each.for_s)} `, each.by && h("span", { class: "dim" }, `by ${each.by} `),
        !this.saved && h("button", { type: "button", class: "quiet", onclick: () => this.order(`Readmit ${each.host}`, "readmit", each.host) }, "readmit")))]);
    const loaded = shown.filter((node) => node.load);
    fill(this.loadTable, loaded.map((node) => [node.host, node.load]), () => this.loads(loaded));
  }

  /** The page goes on with the curves that it got at first. */
  addLoads(now) {
    if (now.at - (this.loaded ?? 0) < LOADS_S) return;
    this.loaded = now.at;
    const known = this.load_curves;
    for (const { host, load } of now.nodes) {
      if (!load || (!known[host] && Object.keys(known).length >= LOAD_NODES_MAX)) continue;
      const points = (known[host] ??= []), gpus = load.gpus.map((gpu) => gpu.percent);
      if (points.length && points.at(-1)[0] >= now.at - LOADS_S / 2) continue;
      points.push([now.at, load.cpu_percent, load.memory_total_bytes ? 100 * load.memory_bytes / load.memory_total_bytes : null, gpus.length ? gpus.reduce((sum, each) => sum + each, 0) / gpus.length : null]);
      if (points.length > LOAD_POINTS_MAX) known[host] = points.filter((_, index) => index % 2);
    }
    this.showLoad();
  }

  showLoad() {
    const hosts = Object.keys(this.load_curves);
    this.loadCourse.hidden = !hosts.length || !window.uPlot;
    if (this.loadCourse.hidden || this.nodes.hidden) return;
    fill(this.loadNode, hosts, () => hosts.map((host) => h("option", { value: host, selected: host === this.loadNode.value }, host)));
    const percent = (value) => `${Math.round(value)} %`;
    this.loadChart ??= new Chart(this.loadCourse.lastChild, [["processors", "c0", percent], ["memory", "c6", percent], ["GPUs, mean", "c5", percent]]);
    this.loadChart.set(this.load_curves[this.loadNode.value] ?? []);
  }

  showMetrics() {
    const { names, rows } = this.story.metrics ?? { names: [], rows: [] };
    this.metrics.hidden = !names.length;
    if (!names.length) return;
    fill(this.metric, names, () => {
      const chosen = names.includes(this.metric.value) ? this.metric.value : names.find((name) => name === "loss") ?? names[0];
      return names.map((name) => h("option", { value: name, selected: name === chosen }, name));
    });
    const place = names.indexOf(this.metric.value) + 2, newest = rows.at(-1), number = (value) => String(+value.toPrecision(6));
    this.newestMetric.textContent = `${this.metric.value} ${number(newest[place])} at step ${newest[1]}`;
    const points = rows.map((row) => [row[0], row[place]]);
    if (!window.uPlot || JSON.stringify([place, points]) === this.shownMetric) return;
    this.shownMetric = JSON.stringify([place, points]);
    this.metricChart ??= new Chart(this.metrics.querySelector(".chart"), [["value", "c0", number]], false);
    this.metricChart.set(points);
  }

  loads(nodes) {
    const part = (used, total) => (total ? `${bytes(used)}, ${Math.round(100 * used / total)} %` : "–"), most = (gpus, figure) => Math.max(...gpus.map((gpu) => gpu[figure]));
    return nodes.length > 0 && [h("h3", {}, "Load"), table(["node", ["processors", "number"], ["memory", "number"], ["disk free", "number"], ["network in", "number"], ["out", "number"], ["agent answers in", "number"], "GPUs"],
      nodes.map(({ host, load }) => [host, [`${load.cpu_percent} % of ${load.cores}`, "number"], [part(load.memory_bytes, load.memory_total_bytes), "number"], [part(load.disk_free_bytes, load.disk_total_bytes), "number"],
        [`${bytes(load.received_bytes_s)}/s`, "number"], [`${bytes(load.sent_bytes_s)}/s`, "number"], [milliseconds(load.lag_ms), "number"],
        load.gpus.length ? h("details", { open: this.opened.has(host), ontoggle: (event) => this.opened[event.target.open ? "add" : "delete"](host) }, h("summary", {}, `${load.gpus.length}: ${Math.min(...load.gpus.map((gpu) => gpu.percent))}–${most(load.gpus, "percent")} %, up to ${bytes(most(load.gpus, "used_bytes"))}, ${most(load.gpus, "celsius")} °C`),
          load.gpus.map((gpu) => h("div", { class: "small" }, `GPU ${gpu.index}: ${gpu.percent} %, ${part(gpu.used_bytes, gpu.total_bytes)}, ${gpu.celsius} °C`))) : "none"]), "Load of the nodes")];
  }

  // ------------------------------------------------------------- 9: snapshots

  showSnapshots(story) {
    const found = story.snapshots ?? [];
    this.snapshots.hidden = !found.length;
    const copied = story.copies?.survivable_step;
    const lost = (step) => step != null && story.curve.length ? plural(Math.max(0, story.curve.at(-1)[1] - step), "step") : "–";
    fill(this.snapshots, [found, story.copies, story.curve.at(-1)], () => [h("h2", {}, "Snapshots"), found.map((each) => [
      h("p", { class: "small dim" }, each.folder),
      each.error ? h("p", {}, each.error) : h("dl", { class: "tiles" }, [
        ["newest", each.newest ? `step ${each.newest.step}` : "none", each.newest ? `saved ${date(each.newest.at)}` : ""],
        ["lost now", lost(each.newest?.step), "if all memory were lost"],
        ...(story.copies ? [["lost with a node", lost(Math.max(copied ?? -1, each.newest?.step ?? -1)), copied == null ? "not copied yet" : `step ${copied} is on two nodes`]] : []),
        ["kept", each.count === null ? "–" : String(each.count), each.count === null ? "in an object store: `holdfast snaps` lists them" : each.problems ? `${each.problems} damaged` : "manifests and sizes are valid"],
        ["training waited", each.newest?.stall_s !== undefined && each.newest?.stall_s !== null ? milliseconds(each.newest.stall_s * 1000) : "–", "for this save, on rank 0"],
        ["writing it took", each.newest?.took_s ? duration(each.newest.took_s) : "–", each.newest?.size ? bytes(each.newest.size) : ""],
      ].map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, more && h("small", {}, more)))))])]);
  }

  // ------------------------------------------------------------- 10: actions

  buttons() {
    const ask = (text, what, question, danger) => h("button", { type: "button", class: danger ? "danger" : null, onclick: () => this.confirm(text, what, question) }, text);
    return [
      h("button", { type: "button", onclick: () => this.order("Save", "save") }, "Save now"),
      ask("Stop the job", "stop", "Workers go to their next safe point, save, and the job ends on all nodes. Workers without safe points are stopped at once.", true),
      ask("Kill the job", "kill", "Every worker is killed at once. Nothing is saved.", true),
    ];
  }

  hostButtons(host) {
    const ask = (what, words) => h("button", { type: "button", class: "quiet", title: words, "aria-label": `${what} ${host}`, onclick: () => this.confirm(`${what} ${host}`, what.toLowerCase(), words, host) }, what.toLowerCase());
    return h("span", { class: "nowrap" }, ask("Drain", "The workers save at their next safe point, and the nodes of this host leave the job. The others go on if they are enough."),
      ask("Exclude", "The nodes of this host leave the job as for a drain, and take no part for an hour."));
  }

  confirm(text, what, question, host) {
    const dialog = h("dialog", { "aria-label": text }, h("h2", {}, `${text}?`), h("p", {}, question), h("div", { class: "row" },
      h("button", { type: "button", class: "danger", onclick: () => { dialog.close(); this.order(text, what, host); } }, text),
      h("button", { type: "button", autofocus: true, onclick: () => dialog.close() }, "Cancel")));
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
  }

  async order(text, what, host = "") {
    const answer = await this.act(what, { host });
    if (answer) this.answer.textContent = `${text}: ${answer.nodes === undefined ? "done" : `sent to ${plural(answer.nodes, "node")}`}.`;
  }

  /** The answer; null: an error, which is shown. */
  async act(what, more = {}) {
    try {
      const answer = await fetch("act", { method: "POST", body: JSON.stringify({ do: what, ...more }) });
      const body = answer.headers.get("content-type")?.includes("json") ? await answer.json() : { error: await answer.text() };
      if (answer.ok) return body;
      this.answer.textContent = body.error;
    } catch {
      this.answer.textContent = "The dashboard does not answer.";
    }
    this.actions.hidden = false;
    return null;
  }
}

// --- all jobs ----------------------------------------------------------------------------------------------------------

const TWO_RUNS = [
  ["end", (run) => run.end || "running, or not known"], ["verdict", (run) => [run.code, run.cause].filter(Boolean).join(": ") || "–"], ["began", (run) => (run.began ? date(run.began) : "–")],
  ["duration", (run) => run.total_s, duration], ["effective training time", (run) => run.effective, (share) => `${Math.round(share * 100)} %`], ["training", (run) => run.training_s, duration],
  ["start-up", (run) => run.startup_s, duration], ["down", (run) => run.down_s, duration], ["hanging", (run) => run.hung_s, duration], ["lost work", (run) => run.lost_s, duration],
  ["until the first step", (run) => run.start_s, duration], ["steps", (run) => (run.steps === null || run.counts_job ? run.steps : `${run.steps} since its last restart`)],
  ["steps per second of training", (run) => (run.steps && run.counts_job && run.training_s ? +(run.steps / run.training_s).toPrecision(3) : null)],
  ["steps lost to restarts", (run) => run.lost_steps], ["ranks", (run) => run.ranks], ["generations", (run) => run.generations], ["restarts", (run) => run.restarts], ["failures", (run) => run.failures.join(", ") || "none"],
];

/** Two runs side by side. */
async function compare(place, names) {
  const answer = await fetch(`compare?${new URLSearchParams(names.map((name) => ["run", name]))}`);
  if (!answer.ok) {
    place.replaceChildren(h("p", {}, "These runs cannot be compared: one of them has no run folder any more."));
    return;
  }
  const runs = await answer.json(), metrics = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))];
  const words = (run, [, value, say = String]) => (value(run) === null || value(run) === undefined ? "–" : say(value(run)));
  const lines = [...TWO_RUNS, ...metrics.map((name) => [`${name}, at the newest snapshot`, (run) => run.metrics[name], (value) => String(+value.toPrecision(6))])];
  place.replaceChildren(h("h2", {}, "Two runs"), table(["", ...runs.map((run) => run.name)], lines.map((line) => [line[0], ...runs.map((run) => [words(run, line), "words"])]), "Two runs"));
  place.scrollIntoView({ block: "nearest" });
}

async function showJobs() {
  const section = h("section", { "aria-label": "Jobs" }), two = h("section", { "aria-label": "Two runs", hidden: true }), chosen = new Set();
  main.append(section, two);
  const choose = (name, taken) => {
    chosen[taken ? "add" : "delete"](name);
    if (chosen.size > 2) {  // the one that was chosen first
      const [oldest] = chosen;
      chosen.delete(oldest);
      for (const box of section.querySelectorAll("input")) box.checked = chosen.has(box.value);
    }
    two.hidden = chosen.size < 2;
    if (!two.hidden) compare(two, [...chosen]);
  };
  document.getElementById("title").textContent = "jobs of this user on this machine";
  document.title = "jobs · holdfast";
  const kinds = { succeeded: "good", failed: "bad", refused: "bad", no_quorum: "bad" };
  const show = async () => {
    try {
      const jobs = await (await fetch("jobs")).json();
      link.textContent = "";
      fill(section, jobs, () => [h("h2", {}, "Jobs"), jobs.length ? table(["compare", "job", "state", "since", "what"], jobs.map((each) => [
        each.folder && h("input", { type: "checkbox", "aria-label": `Compare ${each.name}`, value: each.name, checked: chosen.has(each.name), onchange: (event) => choose(each.name, event.target.checked) }),
        h("a", { href: `job/${encodeURIComponent(each.name)}/` }, each.run_id || each.name),
        h("span", { class: `tag ${each.running ? "good" : kinds[each.end] ?? "busy"}` }, each.running ? "running" : each.end), date(each.at),
        [each.running ? each.script : `${each.code ? `${each.code}: ` : ""}${each.cause}`, "words"]]), "Jobs") : h("p", {}, "No job here yet: `holdfast run …` starts one.")]);
    } catch {
      link.textContent = "the dashboard does not answer";
    }
  };
  await show();
  setInterval(() => document.hidden || show(), 5000);
}

const saved = document.getElementById("saved");
if (document.body.dataset.page === "jobs") showJobs();
else window.page = new JobPage(saved ? JSON.parse(saved.textContent) : null);

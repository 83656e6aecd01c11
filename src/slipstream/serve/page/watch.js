// The live half: one event a second with the engine's counts, from which everything here is drawn.

import { ask, events, Refused } from "./server.js";
import { colourOf } from "./colours.js";
import { legend, line, lines, nice, rows, stacks, element } from "./plots.js";

const $ = (id) => document.getElementById(id);
const KEPT = 300; // views, a second apart
const MINUTE = 60;
const PARTS = [["draft", "draft_s"], ["verify", "verify_s"], ["host", "host_s"]];
const REASONS = {
  drafted: ["drafted", "a drafter guessed for an answer"],
  declined: ["not expected to pay", "the planner expected the guesses to cost more than they bring"],
  no_guess: ["no guess", "the drafter had none"],
  off: ["off", "the request has no drafter, or drafts are switched off"],
  plain: ["plain round", "to compare drafted rounds with, or because drafts slow requests of this kind down"],
  limited: ["at a limit", "the answer, a context or the pass ends here"],
  no_pages: ["no room", "no page of the cache was free"],
  late: ["late", "the drafter was not ready in time"],
  failed: ["failed", "the drafter had failed for this answer"],
};

const views = []; // the newest last
const kinds = []; // of requests, in the order in which they became known

/** Follow the server for good. locked: called when it does not take the key any more. */
export async function watch(locked) {
  for (const choice of document.getElementsByName("span")) choice.addEventListener("change", show);
  for (;;) {
    try {
      for await (const data of events(await ask("/live?stream=true&every=1"))) {
        views.push(JSON.parse(data));
        if (views.length > KEPT) views.shift();
        show();
      }
      say("wait", "the server is ending");
    } catch (error) {
      if (error instanceof Refused && error.status === 401) return locked();
      say("bad", "no connection, trying again");
    }
    await new Promise((resume) => setTimeout(resume, 2000));
  }
}

function say(state, words) {
  $("health").dataset.state = state;
  $("health").textContent = words;
}

function show() {
  const now = views.at(-1);
  if (!now) return;
  const whole = now.engine.pages > 0; // else it is the view of one key, without figures of others
  const up = `up ${duration(now.uptime_s)}${whole ? "" : " · requests of this key"}`;
  say(now.health === "ok" ? "ok" : "bad", now.health === "ok" ? up : now.health);
  for (const part of document.querySelectorAll(".whole")) part.hidden = !whole;
  const grown = growth(now);
  showTiles(now, grown);
  showRounds();
  showDrafters(now, grown);
  showCache(now.engine, grown);
  showPlan(now.engine);
  showDecisions(grown);
}

/** Has the server begun anew between two views? Its counts then begin anew as well. */
const anew = (before, after) => after.uptime_s < before.uptime_s;

/** How much every count grew over the time that the reader chose. */
function growth(now) {
  let base = null;
  if (document.querySelector("[name=span]:checked").value === "minute") {
    base = views.find((view) => now.time - view.time <= MINUTE && !anew(view, now)) ?? null;
  }
  return difference(now.engine, base?.engine);
}

function difference(after, before) {
  if (typeof after === "number") return after - (typeof before === "number" ? before : 0);
  if (after === null || typeof after !== "object") return after;
  return Object.fromEntries(Object.entries(after).map(([name, value]) => [name, difference(value, before?.[name])]));
}

function showTiles(now, grown) {
  $("rate").textContent = figure(now.tokens_per_s);
  line($("rate-line"), views.map((view) => (view === views[0] && view.seconds > 5 ? 0 : view.tokens_per_s)), Math.max(MINUTE, views.length));
  $("running").textContent = now.engine.running;
  $("waiting").textContent = `running, ${now.engine.waiting} waiting`;
  $("tau").textContent = grown.turns ? (grown.generated_tokens / grown.turns).toFixed(2) : "–";
  $("tau-note").textContent = `${count(grown.generated_tokens)} tokens`;
  $("alpha").textContent = percent(grown.accepted_tokens, grown.draft_tokens);
  $("alpha-note").textContent = `${count(grown.accepted_tokens)} of ${count(grown.draft_tokens)}`;
}

function showRounds() {
  const columns = views.slice(1).map((view, i) => {
    const rounds = view.engine.rounds - views[i].engine.rounds;
    if (rounds <= 0 || anew(views[i], view)) return null;
    return PARTS.map(([, key]) => (1000 * Math.max(0, view.engine[key] - views[i].engine[key])) / rounds);
  });
  const { top, highest } = stacks($("rounds"), columns, PARTS.map(([name]) => name), KEPT);
  const last = columns.findLast(Boolean);
  const scale = milliseconds(top) + (highest ? ` · cut: the highest has ${milliseconds(highest)}` : "");
  $("rounds-top").textContent = last ? scale : "no rounds since this page was opened";
  const values = PARTS.map(([name], i) => ({ name, colour: name, value: last ? milliseconds(last[i]) : "–" }));
  legend($("rounds-legend"), values);
  $("rounds").setAttribute("aria-label", values.map(({ name, value }) => `${name} ${value}`).join(", "));
}

function showDrafters(now, grown) {
  const list = Object.entries(grown.drafters)
    .filter(([name, did]) => did.drafts || did.failures || did.declined || now.engine.dropped[name])
    .map(([name, did]) => ({
      name,
      colour: colourOf(name),
      part: did.drafted ? did.accepted / did.drafted : 0,
      figure: percent(did.accepted, did.drafted),
      note: [
        `${count(did.accepted)} of ${count(did.drafted)} guesses`,
        did.drafts ? `τ ${(1 + did.accepted / did.drafts).toFixed(2)}` : "",
        did.failures ? `${count(did.failures)} failures` : "",
        now.engine.late[name] ? `${count(now.engine.late[name])} times late` : "",
        now.engine.dropped[name] ? "not asked any more" : "",
      ].filter(Boolean).join(" · "),
      title: now.engine.dropped[name] ?? "",
    }));
  rows($("drafters"), list, "Nothing was drafted in this time.");
  const accepted = Object.values(grown.accepted_by_position);
  $("positions").replaceChildren(...accepted.slice(0, 16).map((stood, i) => {
    const column = element("div", "position");
    const fill = element("i");
    fill.style.height = `${grown.drafts ? (100 * stood) / grown.drafts : 0}%`;
    const bar = element("span", "column");
    bar.append(fill);
    column.append(bar, element("span", "", i + 1));
    column.title = `guess ${i + 1} stood in ${percent(stood, grown.drafts)} of the drafts`;
    return column;
  }));
  if (!accepted.length || !grown.drafts) $("positions").replaceChildren(element("p", "small", "No drafts in this time."));
}

function showCache(engine, grown) {
  const parts = [
    ["used", engine.pages_used, "in use"],
    ["cached", engine.pages_cached, "kept for prompts that begin alike"],
    ["free", engine.pages - engine.pages_used - engine.pages_cached, "free"],
  ];
  $("cache").replaceChildren(...parts.map(([name, pages]) => {
    const part = element("i", name);
    part.style.flexGrow = pages;
    return part;
  }));
  legend($("cache-legend"), parts.map(([name, pages, words]) => ({ colour: name, name: words, value: count(pages) })));
  $("cache").setAttribute("aria-label", parts.map(([, pages, words]) => `${pages} pages ${words}`).join(", "));
  const hits = grown.prefix_queries
    ? `${percent(grown.prefix_hits, grown.prefix_queries)} of ${count(grown.prefix_queries)} prompt tokens were there already`
    : "No prompt was looked up in this time";
  $("prefix").textContent = `${hits} · ${count(grown.preemptions)} preemptions`;
}

/** What drafts bring by drafter and batch size, over time, and what was decided last for each drafter, in the planner's words. */
function showPlan({ gains, plan }) {
  for (const kind of Object.keys(gains)) if (!kinds.includes(kind)) kinds.push(kind);
  const series = kinds.map((kind, i) => ({
    colour: `d${7 - (i % 8)}`, // from the other end than drafters, which are elsewhere
    values: views.map((view) => view.engine.gains[kind] ?? null),
  }));
  const { top, highest } = lines($("gains"), series, KEPT, 1);
  $("gains-top").textContent = kinds.length ? times(top) + (highest ? ` · cut: the highest has ${times(highest)}` : "") : "nothing measured yet";
  const told = kinds.map((name, i) => ({ name, colour: series[i].colour, value: name in gains ? times(gains[name]) : "–" }));
  legend($("gains-legend"), told);
  $("gains").setAttribute("aria-label", told.map(({ name, value }) => `${name}: ${value}`).join("; ") || "no gain measured yet");
  $("reasons").replaceChildren(...Object.entries(plan).flatMap(([name, reason]) => {
    const drafter = element("dt", "", "");
    drafter.append(element("i", `swatch ${colourOf(name)}`), name);
    return [drafter, element("dd", "", reason)];
  }));
  if (!Object.keys(plan).length) $("reasons").append(element("dd", "", "Nothing was weighed yet: no drafter, or drafts of a fixed size."));
}

function showDecisions(grown) {
  const list = Object.entries(grown.decisions).filter(([, times]) => times).sort(([, a], [, b]) => b - a);
  const most = list[0]?.[1] ?? 1;
  rows($("decisions"), list.map(([reason, times]) => {
    const [name, title] = REASONS[reason] ?? [reason, ""];
    const colour = reason === "drafted" ? "good" : reason === "failed" || reason === "late" ? "poor" : "plain";
    return { name, title, colour, part: times / most, figure: count(times) };
  }), "No round in this time.");
}

const count = (value) => value.toLocaleString("en");
const figure = (value) => (value >= 100 ? count(Math.round(value)) : value.toFixed(1));
const times = (value) => `${value.toFixed(2)}×`;
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");
const milliseconds = (value) => `${value >= 10 || value === nice(value) ? Math.round(value * 10) / 10 : value.toFixed(2)} ms`;

function duration(seconds) {
  const [days, hours, minutes] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60].map(Math.floor);
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : "less than a minute";
}

// The playground: a conversation with the model, each answer with speculation, without it, or both one after the other.

import { AnswerView, seconds } from "./answer.js";
import { element } from "./plots.js";
import { ask, events } from "./server.js";

const $ = (id) => document.getElementById(id);
const AIDES = ["prediction", "grammar"]; // drafters that guess from what a request brings, which here is nothing
let model = ""; // as the server calls it
let messages = []; // the conversation so far
let running = null; // what ends the answer that is being written

/** served: the model, as /v1/models has it. May be called again, when the key was asked for again. */
export function openPlayground(served) {
  const first = !model;
  model = served.id;
  $("tokens").max = served.max_model_len;
  offerDrafters();
  if (!first) return;
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("fresh").addEventListener("click", () => {
    running?.abort();
    messages = [];
    $("turns").replaceChildren();
    $("prompt").focus();
  });
}

async function offerDrafters() {
  const { engine } = await (await ask("/live")).json();
  const names = Object.keys(engine.drafters).filter((name) => !AIDES.includes(name));
  const made = names.map((name) => new Option(name, name));
  $("drafter").replaceChildren(new Option("the server's choice", ""), ...made);
}

async function send() {
  const prompt = $("prompt").value.trim();
  const wrong = faults();
  $("ask-error").textContent = wrong.join(" ");
  if (!prompt || wrong.length) return;
  const mode = document.querySelector("[name=mode]:checked").value;
  const asked = [...messages, { role: "user", content: prompt }];
  const request = requestOf(asked);
  const turn = element("article", "turn");
  const answers = element("div", mode === "both" ? "answers both" : "answers");
  turn.append(element("p", "prompt", prompt), answers);
  $("turns").append(turn);
  $("prompt").value = "";
  busy(true);
  try {
    // With speculation first: a drafter that remembers answers would otherwise know this one.
    const on = mode === "off" ? null : await run(answers, "With speculation", request, true);
    const off = mode === "on" || (on && !on.report) ? null : await run(answers, "Without", request, false);
    if (on?.report && off?.report) turn.append(compared(on, off));
    const told = on ?? off;
    if (told.report) messages = [...asked, { role: "assistant", content: told.text }];
  } finally {
    busy(false);
  }
}

/** What is wrong with the settings, in words; the field itself is marked. A browser's own hint is gone in a moment. */
function faults() {
  const remedies = {
    temperature: "must be 0 to 2.",
    seed: "must be a whole number of up to 15 digits, or empty.",
    tokens: `must be a whole number, 1 to ${Number($("tokens").max).toLocaleString("en")}: prompt and answer have room for so many.`,
  };
  return Object.entries(remedies).flatMap(([name, remedy]) => {
    const field = $(name);
    const wrong = !field.checkValidity();
    field.setAttribute("aria-invalid", wrong);
    const label = field.closest("label").firstChild.textContent;
    return wrong ? [`${label}: ${field.value || "this"} ${remedy}`] : [];
  });
}

function requestOf(asked) {
  return {
    model,
    messages: asked,
    temperature: Number($("temperature").value),
    seed: $("seed").value ? Number($("seed").value) : Math.floor(Math.random() * 2 ** 32),
    max_completion_tokens: Number($("tokens").value) || undefined,
    logprobs: $("logprobs").checked,
    stream: true,
  };
}

/** Answer a request on the page. The view has a report if it came to its end. */
async function run(place, title, request, enabled) {
  const view = new AnswerView(title);
  place.append(view.element);
  view.element.scrollIntoView({ block: "nearest" });
  const speculation = { enabled, report: true, origins: true };
  if (enabled && $("drafter").value) speculation.drafter = $("drafter").value;
  running = new AbortController();
  try {
    let report = null;
    const response = await answerTo({ ...request, speculation }, view);
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        view.add(choice);
        report = choice.speculation ?? report;
      }
    }
    if (!report) throw new Error("the stream broke off");
    view.end(report);
  } catch (error) {
    view.fail(error.name === "AbortError" ? "stopped" : error.message);
  }
  return view;
}

async function answerTo(body, view) {
  const { signal } = running;
  try {
    return await ask("/v1/chat/completions", { body, signal });
  } catch (error) {
    if (error.param !== "speculation.origins") throw error;
    view.told = false;
    return ask("/v1/chat/completions", { body: { ...body, speculation: { ...body.speculation, origins: false } }, signal });
  }
}

/** What came of the same request both ways. */
function compared(on, off) {
  const [a, b] = [on, off].map((view) => (view.told ? view.tokens.map((token) => token.id) : [...view.text]));
  const unit = on.told ? "token" : "character";
  const length = Math.max(a.length, b.length);
  const part = Array.from({ length }).findIndex((_, i) => a[i] !== b[i]);
  const words = element("p", part < 0 ? "verdict same" : "verdict other");
  if (part < 0) {
    // Both read the same prompt, but the second may find it in the cache: so from the first token on.
    const [fast, plain] = [on, off].map(({ report }) => report.seconds.total - report.seconds.first_token);
    words.append(element("b", "", `The same ${a.length} ${unit}s.`));
    if (fast > 0) {
      words.append(` From the first to the last ${seconds(fast)} with speculation, ${seconds(plain)} without: `);
      words.append(element("b", "", `${(plain / fast).toFixed(2)}×`), " as fast.");
    }
  } else {
    on.markFrom(part);
    off.markFrom(part);
    words.append(element("b", "", `They part at ${unit} ${part + 1}.`), " The seed and all settings were the same.");
  }
  return words;
}

function busy(is) {
  if (!is) running = null;
  $("send").disabled = is;
  $("stop").hidden = !is;
}

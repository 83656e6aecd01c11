// One answer as it comes: its text in spans, one a token, coloured by who guessed it.

import { colourOf } from "./colours.js";
import { element, legend } from "./plots.js";

export class AnswerView {
  /** title: what this answer shows; shown beside its times. */
  constructor(title) {
    this.tokens = []; // {id, text, origin, chance}
    this.text = "";
    this.told = true; // does the server say who guessed what? Where it hides acceptance it does not.
    this.element = element("section", "answer");
    this._head = element("h3", "", title);
    this._times = element("span", "times small", "…");
    this._head.append(" ", this._times);
    this._text = element("div", "text");
    this._text.tabIndex = 0;
    this._text.setAttribute("role", "group");
    this._text.setAttribute("aria-label", `${title}: the answer; arrow keys go from token to token`);
    this._legend = element("ul", "legend");
    this._readout = element("p", "readout small");
    this._readout.setAttribute("aria-live", "polite");
    this.element.append(this._head, this._text, this._readout, this._legend);
    this._chars = []; // of the text: characters as the server counts them, not UTF-16
    this._spelled = 0; // characters that are in spans
    this._placed = 0; // tokens that have spans
    this._chosen = -1;
    this._begun = performance.now();
    this._listen();
  }

  /** What an event of the stream brought. */
  add(choice) {
    const chances = choice.logprobs?.content ?? [];
    (choice.origins ?? []).forEach((origin, i) => {
      this.tokens.push({ id: origin.token, origin, text: "", chance: chances[i] && Math.exp(chances[i].logprob) });
    });
    if (choice.delta.content) {
      this.text += choice.delta.content;
      for (const char of choice.delta.content) this._chars.push(char);
    }
    if (this.told) this._place(false);
    else this._spell();
    const many = this.told ? `${this.tokens.length} tokens, ` : "";
    this._times.textContent = many + seconds((performance.now() - this._begun) / 1000);
  }

  /** The stream is over. report: what the server says that speculation did. */
  end(report) {
    this._place(true);
    this.report = report;
    const { first_token: first, total } = report.seconds;
    const rate = total > first ? ` · ${((report.tokens - 1) / (total - first)).toFixed(1)} tok/s` : "";
    this._times.textContent = `${report.tokens} tokens in ${seconds(total)}${rate} · τ ${report.tau.toFixed(2)}`;
    this._times.title = `first token after ${seconds(first)}; ${report.why}`;
    this._tellOrigins();
  }

  fail(words) {
    this._place(true);
    this._tellOrigins();
    this.element.append(element("p", "error", words));
  }

  /** Show where it parts from another answer. */
  markFrom(place) {
    this.tokens[place]?.span?.classList.add("parts");
  }

  _place(final) {
    for (; this._placed < this.tokens.length; this._placed++) {
      const token = this.tokens[this._placed];
      const last = final && this._placed === this.tokens.length - 1;
      const end = last ? this._chars.length : Math.min(token.origin.text_end, this._chars.length);
      if (!final && end < token.origin.text_end) return; // its text is held back
      token.text = this._chars.slice(this._spelled, end).join("");
      this._spelled = Math.max(this._spelled, end);
      token.span = this._span(token, this._placed);
      if (token.text) this._text.append(token.span);
    }
    if (final) this._spell();
  }

  /** Show the text that no token has. */
  _spell() {
    if (this._spelled < this._chars.length) this._text.append(this._chars.slice(this._spelled).join(""));
    this._spelled = this._chars.length;
  }

  _span(token, place) {
    const by = token.origin.drafters;
    const span = element("span", by.length ? `token guessed ${colourOf(by[0])}` : "token", token.text);
    if (by.length > 1) span.classList.add("shared");
    span.dataset.place = place;
    span.dataset.by = by.join("+") || "target";
    return span;
  }

  _tellOrigins() {
    const counts = new Map();
    for (const { origin } of this.tokens) {
      const name = origin.drafters.join(" and ") || "the model itself";
      const [first, ...others] = origin.drafters;
      const colour = first ? `${colourOf(first)}${others.length ? " shared" : ""}` : "target";
      counts.set(name, { colour, name, value: (counts.get(name)?.value ?? 0) + 1 });
    }
    legend(this._legend, [...counts.values()].sort((a, b) => b.value - a.value));
  }

  _listen() {
    const point = (event) => {
      const place = event.target.dataset?.place;
      if (place !== undefined) this._choose(Number(place));
    };
    this._text.addEventListener("pointerover", point);
    this._text.addEventListener("click", point);
    this._text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      let place = this._chosen + step;
      while (this.tokens[place] && !this.tokens[place].text) place += step; // those without text have no place in it
      if (this.tokens[place]) this._choose(place);
    });
  }

  _choose(place) {
    this.tokens[this._chosen]?.span?.classList.remove("chosen");
    this._chosen = place;
    const { origin, text, chance, span } = this.tokens[place];
    span.classList.add("chosen");
    const who = origin.drafters.length
      ? `guess ${origin.depth} of the draft, by ${origin.drafters.join(" and ")}`
      : "the model's own token";
    const likely = chance === undefined ? "" : ` · probability ${(100 * chance).toFixed(1)}%`;
    this._readout.textContent = `${JSON.stringify(text)} · round ${origin.round} · ${who}${likely}`;
  }
}

export const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);

// Small drawings, made of plain elements: lines, columns, bars. Their colours are classes; numbers are drawn to scale here.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

/** A path of its own class in a drawing of width x height, made when it is first asked for. */
function path(svg, className, width, height) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  let found = svg.querySelector(`.${className}`);
  if (!found) {
    found = document.createElementNS(SVG, "path");
    found.setAttribute("class", className);
    svg.append(found);
  }
  return found;
}

/** A number that is easy to read, at or above this one. */
export function nice(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 3, 4, 5, 6, 8, 10].find((step) => step * unit >= value * 0.999);
}

/** What a drawing's top stands for. A few values that are far above the others are cut, so that the others can be seen:
 *  the scale then says how high they were. */
export function scale(values) {
  const sorted = values.filter((value) => value > 0).sort((a, b) => a - b);
  const highest = sorted.at(-1) ?? 0;
  const usual = sorted[sorted.length - 1 - Math.ceil(sorted.length * 0.03)] ?? highest;
  const top = nice(highest > 2 * usual ? usual * 1.25 : highest);
  return { top, highest: highest > top * 1.001 ? highest : null };
}

/** Values over time as a line with its area, the newest at the right. */
export function line(svg, values, most) {
  const { top } = scale(values);
  const x = (i) => most - values.length + i;
  const points = values.map((value, i) => `${x(i)},${(38 - (Math.min(value, top) / top) * 36).toFixed(2)}`);
  if (!points.length) return;
  path(svg, "area", most - 1, 40).setAttribute("d", `M${x(0)},40 L${points.join(" L")} V40 Z`);
  path(svg, "stroke", most - 1, 40).setAttribute("d", `M${points.join(" L")}`);
  const cut = values.map((value, i) => (value > top ? `M${x(i) - 0.7} .6h1.4` : "")).join("");
  path(svg, "cut", most - 1, 40).setAttribute("d", cut);
}

/** Several lines over time in one scale, with a level to compare with. series: {colour, values}; null: nothing there.
 *  Returns the scale. */
export function lines(svg, series, most, level) {
  const found = scale([level * 1.5, ...series.flatMap(({ values }) => values)]);
  const y = (value) => (98 - (Math.min(value, found.top) / found.top) * 96).toFixed(2);
  path(svg, "level", most - 1, 100).setAttribute("d", `M0 ${y(level)}H${most - 1}`);
  for (const old of svg.querySelectorAll(".series")) old.remove();
  for (const { colour, values } of series) {
    let drawn = "";
    values.forEach((value, i) => {
      const at = `${most - values.length + i} ${y(value ?? 0)}`;
      if (value !== null) drawn += (values[i - 1] ?? null) === null ? `M${at}h.01` : `L${at}`;
    });
    const made = document.createElementNS(SVG, "path");
    made.setAttribute("class", `series ${colour}`);
    made.setAttribute("d", drawn);
    svg.append(made);
  }
  return found;
}

/** Columns over time, each a stack; `columns` holds lists of as many numbers as there are classes, or null for nothing.
 *  Returns the scale. */
export function stacks(svg, columns, classes, most) {
  const sums = columns.map((parts) => parts?.reduce((a, b) => a + b, 0) ?? 0);
  const found = scale(sums);
  const { top } = found;
  const drawn = classes.map(() => "");
  let cut = "";
  columns.forEach((parts, i) => {
    if (!parts) return;
    const x = most - columns.length + i;
    if (sums[i] > top * 1.001) cut += `M${x - 0.2} 6h1.22v4h-1.22Z`;
    let below = 100;
    parts.forEach((part, k) => {
      const above = Math.max(0, below - (part / top) * 100);
      drawn[k] += `M${x} ${below.toFixed(2)}h.82V${above.toFixed(2)}h-.82Z`;
      below = above;
    });
  });
  classes.forEach((name, k) => path(svg, name, most, 100).setAttribute("d", drawn[k]));
  path(svg, "cut", most, 100).setAttribute("d", cut); // a gap in the columns that go on beyond the top
  return found;
}

/** Rows of a name, a bar and a figure. row: {name, part (0 to 1), figure, note, colour, title} */
export function rows(place, list, empty) {
  place.replaceChildren(...list.map((row) => {
    const made = element("div", `row ${row.colour ?? ""}`);
    if (row.title) made.title = row.title;
    const head = element("div", "row-head");
    head.append(element("span", "name", row.name), element("span", "value", row.figure));
    const bar = element("div", "bar");
    const fill = element("i");
    fill.style.width = `${(100 * row.part).toFixed(1)}%`;
    bar.append(fill);
    made.append(head, bar);
    if (row.note) made.append(element("p", "small", row.note));
    return made;
  }));
  if (!list.length) place.append(element("p", "small", empty));
}

export function legend(place, entries) {
  place.replaceChildren(...entries.map(({ colour, name, value }) => {
    const entry = element("li");
    entry.append(element("i", `swatch ${colour}`), `${name} `, element("b", "", value));
    return entry;
  }));
}

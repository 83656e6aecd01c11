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

/** Values over time as a line with its area, the newest at the right. */
export function line(svg, values, most) {
  const top = nice(Math.max(...values, 0));
  const points = values.map((value, i) => `${most - values.length + i},${(38 - (value / top) * 36).toFixed(2)}`);
  const [first] = points;
  if (!first) return;
  path(svg, "area", most - 1, 40).setAttribute("d", `M${first.split(",")[0]},40 L${points.join(" L")} V40 Z`);
  path(svg, "stroke", most - 1, 40).setAttribute("d", `M${points.join(" L")}`);
}

/** Columns over time, each a stack; `columns` holds lists of as many numbers as there are classes, or null for nothing.
 *  Returns the value at the top. What is far above the others is cut, so that they can be seen. */
export function stacks(svg, columns, classes, most) {
  const sums = columns.filter(Boolean).map((parts) => parts.reduce((a, b) => a + b, 0)).sort((a, b) => a - b);
  const top = nice((sums[Math.floor(sums.length * 0.97)] ?? 0) * 1.1);
  const drawn = classes.map(() => "");
  columns.forEach((parts, i) => {
    if (!parts) return;
    const x = most - columns.length + i;
    let below = 100;
    parts.forEach((part, k) => {
      const above = Math.max(0, below - (part / top) * 100);
      drawn[k] += `M${x} ${below.toFixed(2)}h.82V${above.toFixed(2)}h-.82Z`;
      below = above;
    });
  });
  classes.forEach((name, k) => path(svg, name, most, 100).setAttribute("d", drawn[k]));
  return top;
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

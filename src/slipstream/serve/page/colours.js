// Which drafter has which colour: the same in every part of the page, in the order in which they became known.

const COLOURS = 8; // as many as style.css has
const known = [];

/** The class that colours what is this drafter's. */
export function colourOf(name) {
  if (!known.includes(name)) known.push(name);
  return `d${known.indexOf(name) % COLOURS}`;
}

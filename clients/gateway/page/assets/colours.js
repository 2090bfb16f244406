// Which colour a class or a tenant has. Colours themselves stand in page.css, for either theme.

export const COLOURS = 10;
const MOST_NAMES = 500;

/** Gives each name a colour, first come first served; beyond ten they repeat, and the label tells them apart. */
export class Palette {
  #names = new Map();

  /** Gives names the first colours, in order: classes, the most urgent first. */
  know(names) {
    for (const name of names) this.of(name);
  }

  /** The number of a name's colour. */
  of(name) {
    let found = this.#names.get(name);
    if (found === undefined) {
      found = this.#names.size % COLOURS;
      if (this.#names.size < MOST_NAMES) this.#names.set(name, found);
    }
    return found;
  }
}

/** What the theme makes of the colours just now: `{colours: ["rgb(...)", ...], ink, faint, ...}`. */
export function themeColours(host) {
  const probe = document.createElement("span");
  probe.hidden = true;
  host.append(probe);
  const read = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const found = {
    colours: Array.from({ length: COLOURS }, (_, place) => read(`--c${place}`)),
    onColour: read("--on-colour"),
    ink: read("--ink"),
    faint: read("--faint"),
    line: read("--line"),
    lane: read("--lane"),
    card: read("--card"),
    host: read("--host"),
    warn: read("--warn"),
  };
  probe.remove();
  return found;
}

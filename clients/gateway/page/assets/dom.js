// Small helpers. Text from outside only ever becomes text: nothing here takes HTML.

/** The element with an id; a missing one is a fault of the page. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element #${id}`);
  return found;
}

/** Makes an element: `make("td", {class: "n"}, "text", child, ...)`. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** Sets text if it changed: screen readers hear of changes alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Replaces an element's children, unless they would be what they are; focus within survives where it can. */
export function replace(element, ...children) {
  const fresh = make("div", {}, ...children);
  if (fresh.innerHTML === element.innerHTML) return;
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  element.replaceChildren(...fresh.childNodes);
  if (focused !== undefined) {
    for (const one of element.querySelectorAll("[data-key]")) if (one.dataset.key === focused) return one.focus();
  }
}

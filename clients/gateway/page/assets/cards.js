// Everything beside the picture: figures, tables, meters, lists. Each takes where to draw and what.
import { byId, make, replace, setText } from "./dom.js";
import { bytes, clock, count, queryName, seconds } from "./format.js";
import { keyOf } from "./history.js";

const MOST_WAITING = 200;
const SVG = "http://www.w3.org/2000/svg";

/** The strip of single figures. */
export function drawFigures(frame, history, info) {
  const busy = frame.rows.filter(Boolean).length;
  const parked = frame.queries.filter((query) => query.state === "parked");
  const waiting = frame.queries.length - parked.length + frame.more;
  const limit = frame.memory?.row_limit;
  const rate = history.tokensPerS;
  const of = limit && limit < frame.rows.length ? `of ${limit}, ${frame.rows.length} built` : `of ${frame.rows.length}`;
  const items = [
    ["Rows busy", count(busy), of],
    ["Tokens", rate === null ? "–" : count(rate), "a second"],
    ["Parked", count(parked.length), parked.length ? bytes(parked.reduce((sum, one) => sum + one.bytes, 0)) : ""],
    ["Waiting", count(waiting + frame.queued), frame.queued ? `${count(frame.queued)} in the queue` : ""],
    ["Parks", count(frame.counters.parks ?? 0), "since the start"],
    ["Policy", info?.policy ?? "–", ""],
  ];
  replace(byId("figures"), ...items.map(([name, value, aside]) => make("div", {}, make("dt", {}, name), make("dd", {}, make("bdi", { title: value }, value), " ", make("small", {}, aside)))));
}

/** What each colour stands for; only what is to be seen. */
export function drawLegend(names, palette) {
  const items = names.map((name) => make("li", {}, make("span", { class: `swatch c${palette.of(name)}` }), make("bdi", { title: name }, name)));
  replace(byId("legend"), ...items, make("li", {}, make("span", { class: "swatch parked" }), "parked in host RAM"));
}

/** Latencies by class against their targets, and how many of each class there are. */
export function drawClasses(frame, palette) {
  const counts = new Map();
  const add = (sla, kind) => {
    const found = counts.get(sla) ?? { running: 0, parked: 0, waiting: 0 };
    found[kind] += 1;
    counts.set(sla, found);
  };
  for (const query of frame.rows) if (query) add(query.sla, "running");
  for (const query of frame.queries) add(query.sla, query.state === "parked" ? "parked" : "waiting");
  const known = frame.classes.map((one) => one.sla);
  const all = [...frame.classes, ...[...counts.keys()].filter((sla) => !known.includes(sla)).map((sla) => ({ sla, first_token: {}, output_token: {} }))];
  const head = make("tr", {}, make("th", { scope: "col" }, "Class"),
    ...["Row", "Parked", "Waiting"].map((name) => make("th", { scope: "col", class: "n wide" }, name)),
    ...["TTFT p50", "p95", "TPOT p50", "p95"].map((name) => make("th", { scope: "col", class: "n" }, name)));
  const rows = all.map((one) => {
    const here = counts.get(one.sla) ?? { running: 0, parked: 0, waiting: 0 };
    return make("tr", {}, make("td", {}, make("span", { class: `swatch c${palette.of(one.sla)}` }), make("bdi", { title: one.sla }, one.sla)),
      ...[here.running, here.parked, here.waiting].map((value) => make("td", { class: "n wide" }, count(value))), ...times(one.first_token), ...times(one.output_token));
  });
  replace(byId("class-table"), make("thead", {}, head), make("tbody", {}, ...rows));
}

function times({ p50_s: half, p95_s: most, target_s: target, samples }) {
  const missed = target !== null && target !== undefined && most > target;
  const title = samples ? `of ${samples}` : "none in the last five minutes";
  return [
    make("td", { class: "n", title }, seconds(half)),
    make("td", { class: "n", title }, make("span", { class: missed ? "miss" : undefined }, `${missed ? "▲ " : ""}${seconds(most)}`), make("small", {}, `of ${seconds(target)}`)),
  ];
}

const GOVERNOR = { steady: "good", growing: "good", shrinking: "warn", critical: "bad", lost: "bad" };

/** Where KV lies, and what the governor makes of it. */
export function drawMemory(frame) {
  const memory = frame.memory;
  const pill = byId("governor");
  const known = memory && memory.governor !== "unknown";
  setText(pill, known ? `governor ${memory.governor}` : "");
  pill.className = `pill ${GOVERNOR[memory?.governor] ?? ""}`;
  if (!memory) return void replace(byId("memory"), make("p", { class: "none" }, "This daemon doesn't say where its KV lies."));
  const parts = [];
  const budget = memory.kv_budget_bytes;
  const most = Math.max(budget ?? 0, memory.committed_bytes + memory.pooled_bytes) || memory.reserved_bytes || 1;
  parts.push(meter("KV of the batch", `${bytes(memory.committed_bytes)} of ${budget === null ? "no bound" : bytes(budget)}`, most,
    [["own", "committed", memory.committed_bytes], ["pooled", "pooled, no row's", memory.pooled_bytes]], budget));
  parts.push(meter("Host pool", `${bytes(frame.host_pool_used)} of ${bytes(frame.host_pool)}`, frame.host_pool,
    [["parked", "parked queries", Math.min(memory.parked_bytes, frame.host_pool_used)], ["others", "sessions and copies under way", Math.max(0, frame.host_pool_used - memory.parked_bytes)]]));
  if (memory.total_bytes) {
    const others = Math.max(0, memory.total_bytes - memory.free_bytes - memory.own_bytes);
    parts.push(meter("Memory of the device", `${bytes(memory.free_bytes)} free of ${bytes(memory.total_bytes)}`, memory.total_bytes,
      [["own", "this engine", memory.own_bytes], ["others", "others", others]]));
  }
  parts.push(make("p", { class: "fine" }, `Spilled to disk: ${bytes(memory.spilled_bytes)}. Rows that may be used: ${memory.row_limit || frame.rows.length} of ${frame.rows.length}.`));
  if (memory.reason) parts.push(make("p", { class: "why" }, make("bdi", {}, memory.reason)));
  replace(byId("memory"), ...parts);
}

function meter(name, words, whole, parts, mark) {
  const bar = document.createElementNS(SVG, "svg");
  bar.setAttribute("viewBox", "0 0 1000 14");
  bar.setAttribute("preserveAspectRatio", "none");
  bar.setAttribute("aria-hidden", "true");
  let x = 0;
  const rect = (kind, width) => {
    const one = document.createElementNS(SVG, "rect");
    for (const [key, value] of Object.entries({ class: kind, x: Math.min(x, 1000), width, height: 14 })) one.setAttribute(key, value);
    bar.append(one);
  };
  for (const [kind, , value] of parts) {
    const width = whole ? Math.min(1000 - x, Math.round((value / whole) * 1000)) : 0;
    rect(kind, width);
    x += width;
  }
  if (mark) {
    x = Math.round((mark / whole) * 1000) - 3;
    rect("mark", 3);
  }
  const keys = parts.map(([, label, value]) => make("span", {}, `${label} ${bytes(value)}`));
  return make("div", { class: "meter" }, make("p", {}, make("span", {}, name), make("span", {}, words)), bar, make("div", { class: "keyed" }, ...keys));
}

/** A button that follows a query through the picture. */
function queryButton(query, key) {
  return make("button", { type: "button", class: "query", "data-key": key, title: `${queryName(query)} of ${query.tenant}` }, queryName(query));
}

function progress(query) {
  return query.max ? `${query.output}/${query.max}` : `${query.output}`;
}

function queryRow(query, palette, followed, first, rest) {
  const key = keyOf(query);
  const swatch = make("span", { class: `swatch c${palette.colourOf(query)}` });
  return make("tr", { class: followed === key ? "followed" : undefined }, ...first, make("td", {}, swatch, queryButton(query, key)),
    make("td", {}, make("bdi", { title: query.tenant }, query.tenant)), make("td", {}, make("bdi", { title: query.sla }, query.sla)), ...rest);
}

function table(element, names, rows, none) {
  const caption = element.querySelector("caption");
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col", class: name.startsWith("#") ? "n" : undefined }, name.replace("#", ""))));
  const body = rows.length ? rows : [make("tr", {}, make("td", { colspan: names.length, class: "none" }, none))];
  replace(element, caption?.cloneNode(true), make("thead", {}, head), make("tbody", {}, ...body));
}

/** Who waits in the engine, and what is parked. */
export function drawWaiting(frame, palette, followed, sinceOf) {
  const shown = frame.queries.slice(0, MOST_WAITING);
  const rows = shown.map((query) => {
    const state = query.held ? "parked by hand" : query.state === "prefilling" ? `prefilling ${query.prefilled}/${query.prompt}` : query.state;
    const since = sinceOf(keyOf(query));
    return queryRow(query, palette, followed, [], [make("td", {}, state), make("td", { class: "n" }, progress(query)), make("td", { class: "n" }, query.parks || ""),
      make("td", { class: "n" }, query.bytes ? bytes(query.bytes) : ""), make("td", { class: "n" }, since === null ? "" : seconds(frame.time - since))]);
  });
  table(byId("waiting-table"), ["Query", "Tenant", "Class", "State", "#Tokens", "#Parks", "#Host RAM", "#Parked for"], rows, "Every query in the engine has a row.");
  const more = frame.queries.length - shown.length + frame.more;
  setText(byId("waiting-count"), [more ? `${count(more)} more in the engine` : "", frame.queued ? `${count(frame.queued)} in the queue behind them` : ""].filter(Boolean).join(", "));
}

/** The picture in words: rows and host RAM as tables. */
export function drawTables(frame, palette, followed) {
  const rows = frame.rows.map((query, row) => {
    const first = [make("td", { class: "n" }, row)];
    if (!query) return make("tr", {}, ...first, make("td", { colspan: 5, class: "none" }, "idle"));
    return queryRow(query, palette, followed, first, [make("td", { class: "n" }, progress(query)), make("td", { class: "n" }, count(query.cached))]);
  });
  table(byId("row-table"), ["#Row", "Query", "Tenant", "Class", "#Tokens", "#KV tokens"], rows, "There are no rows.");
  const parked = frame.queries.filter((query) => query.state === "parked").slice(0, MOST_WAITING).map((query) => queryRow(query, palette, followed, [],
    [make("td", { class: "n" }, progress(query)), make("td", { class: "n" }, query.bytes ? bytes(query.bytes) : "to be computed again"), make("td", { class: "n" }, query.parks)]));
  table(byId("parked-table"), ["Query", "Tenant", "Class", "#Tokens", "#Host RAM", "#Parks"], parked, "Nothing is parked.");
}

const SIGNS = { park: "▼", resume: "▲", gone: "×", gap: "…", restart: "⟳" };

/** What was handed over, newest first. */
export function drawEvents(history, palette, followed) {
  const items = history.events.slice(0, 60).map((event) => {
    const swatch = event.job === undefined ? null : make("span", { class: `swatch c${palette.colourOf(event)}` });
    return make("li", { class: followed && event.job !== undefined && keyOf(event) === followed ? "followed" : undefined, "data-kind": event.kind },
      make("time", {}, clock(event.t)), make("span", { class: "sign", "aria-hidden": "true" }, SIGNS[event.kind]), make("span", {}, swatch, swatch && " ", ...sentence(event)));
  });
  replace(byId("events"), ...(items.length ? items : [make("li", { class: "none" }, "None since this page was opened.")]));
  setText(byId("events-count"), `${count(history.parks)} parks and ${count(history.resumes)} resumes seen`);
}

function sentence(event) {
  const button = () => queryButton(event, keyOf(event));
  const aside = (text) => make("span", { class: "aside" }, text);
  switch (event.kind) {
    case "park": {
      const copied = event.bytes ? `, ${bytes(event.bytes)} to host` : ", to be computed again";
      if (event.held) return [button(), ` left row ${event.row}`, aside(`${copied}, by hand`)];
      const taker = event.taker ? [" for ", make("bdi", {}, queryName(event.taker)), ` (${event.taker.sla})`] : [];
      return [button(), ` left row ${event.row}`, ...taker, aside(copied)];
    }
    case "resume":
      return [button(), ` is back in row ${event.row}`, aside(` after ${seconds(event.seconds)}`)];
    case "gone":
      return [button(), " ended while it was parked"];
    case "restart":
      return ["The engine was started anew"];
    default:
      return [`Nothing was heard for ${seconds(event.seconds)}`];
  }
}

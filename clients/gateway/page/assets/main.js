// The page: who may look, the feed, and what is shown when.
import * as cards from "./cards.js";
import { Palette, themeColours } from "./colours.js";
import { byId, make, replace, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { queryName, seconds } from "./format.js";
import { History, keyOf } from "./history.js";
import { SPANS_S, Timeline } from "./timeline.js";

const TOKEN = "batond.token";
const CARDS_EVERY_MS = 250;
const STALE_S = 3;

const history = new History();
const palettes = { class: new Palette(), tenant: new Palette() };
let colourBy = "class";
const palette = {
  of: (name) => palettes[colourBy].of(name),
  colourOf: (query) => palettes[colourBy].of(colourBy === "class" ? query.sla : query.tenant),
};
const timeline = new Timeline(byId("canvas"), history, palette.colourOf);
const still = matchMedia("(prefers-reduced-motion: reduce)");

let feed = null;
let frame = null; // The newest snapshot,
let shown = null; // and the one on the page: the same unless the page is paused.
let info = null;
let link = { state: "connecting", message: "" };
let heardMs = 0; // When the newest snapshot came, by the browser's clock.
let paused = false;
let view = "lanes";
let cardsMs = 0; // When the cards were drawn last,
let drawnMs = 0; // and the picture;
let fresh = false; // whether there is news since.

// -- who may look -----------------------------------------------------------------------------------------------

const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN)),
};

function askForToken(message) {
  feed?.stop();
  feed = null;
  byId("live").hidden = true;
  byId("login").hidden = false;
  byId("leave").hidden = true;
  byId("health").hidden = true;
  byId("daemon-choice").hidden = true;
  setText(byId("served"), "");
  setText(byId("link"), "Not logged in");
  byId("link").className = "pill";
  setText(byId("login-error"), message);
  byId("token").focus();
}

byId("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("token").value.trim();
  byId("token").value = "";
  if (!/^[!-~]+$/.test(given)) return askForToken("That is no token: one has printable ASCII characters alone, and no spaces.");
  token.set(given);
  open(0);
});

byId("leave").addEventListener("click", () => {
  token.set("");
  history.clear();
  frame = shown = info = null;
  askForToken("");
});

function refused(refusal) {
  const had = token.get();
  token.set("");
  history.clear();
  if (refusal.status === 401) return askForToken(had ? `The token is refused: ${refusal.message}` : "");
  if (refusal.status === 403) return askForToken(`You may not see the batch: ${refusal.message}. Your own jobs are shown by batonctl list.`);
  askForToken(refusal.message);
}

// -- the feed ---------------------------------------------------------------------------------------------------

function open(daemon) {
  feed?.stop();
  link = { state: "connecting", message: "" };
  feed = new Feed(daemon, token.get(), {
    refused,
    broken: (message, delayMs) => lost(`${message}; the next attempt is in ${seconds(delayMs / 1000)}`),
    event: (kind, data) => receivers[kind]?.(data),
  });
  drawLink();
  feed.run();
}

const receivers = {
  hello(hello) {
    const entered = byId("live").hidden;
    byId("login").hidden = true;
    byId("live").hidden = false;
    if (entered) byId("live").focus(); // What had the focus is gone.
    byId("leave").hidden = !token.get();
    byId("daemon-choice").hidden = hello.daemons.length < 2;
    replace(byId("daemon"), ...hello.daemons.map((address, place) => make("option", { value: place }, address)));
    byId("daemon").value = String(hello.daemon);
    link = { state: "connecting", message: "" };
  },
  daemon(news) {
    if (info && info.daemon_id !== news.daemon_id) history.interrupted();
    info = news;
    palettes.class.know(info.classes);
    drawInfo();
  },
  batch(news) {
    frame = news;
    heardMs = performance.now();
    link = { state: "live", message: "" };
    history.add(frame);
    for (const query of [...frame.rows, ...frame.queries]) if (query) palettes.tenant.of(query.tenant);
    fresh = true;
    if (still.matches || document.hidden) draw();
  },
  lost: (news) => lost(news.message),
};

function lost(message) {
  if (link.state !== "lost") history.interrupted();
  link = { state: "lost", message };
}

byId("daemon").addEventListener("change", (event) => {
  history.clear();
  frame = shown = info = null;
  open(Number(event.target.value));
});
addEventListener("online", () => feed?.retryNow());
addEventListener("pagehide", () => feed?.stop());
addEventListener("pageshow", (event) => event.persisted && feed && open(feed.daemon));

// -- what is shown ----------------------------------------------------------------------------------------------

const silentS = () => (frame ? (performance.now() - heardMs) / 1000 : 0);

/** The daemon's time now, as far as it may be guessed: what is old does not go on. */
function daemonNow() {
  return shown === frame ? frame.time + (link.state === "live" ? Math.min(silentS(), 0.5) : 0) : shown.time;
}

function drawInfo() {
  setText(byId("served"), `${info.model} on ${info.device}`);
  const health = byId("health");
  const words = { ready: "Ready", loading: "Loading", draining: "Draining", degraded: "Degraded" };
  health.hidden = false;
  setText(health, words[info.state] ?? "State unknown");
  health.className = `pill ${{ ready: "good", loading: "warn", draining: "warn", degraded: "bad" }[info.state] ?? ""}`;
  health.title = info.message;
  const facts = [`batond ${info.version}`, `daemon ${info.daemon_id}`, `up ${seconds(info.uptime_s)}`, `${info.batch_kind} batch`, `parks by ${info.preemption_mode}`];
  replace(byId("foot"), ...facts.map((fact) => make("span", {}, make("bdi", {}, fact))), make("span", {}, make("bdi", {}, info.message)));
}

function drawLink() {
  const pill = byId("link");
  const silent = link.state === "live" && silentS() > STALE_S;
  const state = link.state === "live" ? (silent ? "stale" : paused ? "paused" : "live") : link.state;
  const words = { live: "Live", paused: "Paused", connecting: "Connecting", stale: "Stale", lost: "Stale" };
  setText(pill, words[state]);
  pill.className = `pill ${{ live: "good", paused: "warn", stale: "bad", lost: "bad" }[state] ?? ""}`;
  const stale = byId("stale");
  stale.hidden = !["stale", "lost"].includes(state);
  if (silent) setText(stale, "The engine has not said anything for a while: what you see is old.");
  else if (state === "lost") setText(stale, `What you see is old: ${link.message}.`);
  byId("live").classList.toggle("old", !stale.hidden);
  const ago = frame && !stale.hidden ? `, ${seconds(silentS())} old` : "";
  if (ago) setText(pill, `${words[state]}${ago}`);
}

function draw() {
  if (!paused) shown = frame;
  const nowMs = (drawnMs = performance.now());
  fresh = false;
  if (!byId("live").hidden && shown) {
    timeline.rowCount = Math.max(shown.rows.length, history.rows.findLastIndex((segments) => segments.length) + 1);
    if (view === "lanes") timeline.draw(daemonNow());
    if (nowMs - cardsMs > CARDS_EVERY_MS) {
      cardsMs = nowMs;
      drawCards();
    }
  }
  drawLink();
}

function drawCards() {
  cards.drawFigures(shown, history, info);
  const tenants = colourBy === "tenant";
  const seen = new Set([...shown.rows, ...shown.queries].filter(Boolean).map((query) => (tenants ? query.tenant : query.sla)));
  cards.drawLegend(tenants ? [...seen].sort().slice(0, 24) : [...new Set([...(info?.classes ?? []), ...seen])], palette);
  cards.drawClasses(shown, palettes.class);
  cards.drawMemory(shown);
  cards.drawWaiting(shown, palette, timeline.followed, (key) => history._parked.get(key)?.start ?? null);
  cards.drawEvents(history, palette, timeline.followed);
  if (view === "table") cards.drawTables(shown, palette, timeline.followed);
  const busy = shown.rows.filter(Boolean).length;
  const parked = shown.queries.filter((query) => query.state === "parked").length;
  byId("canvas").setAttribute("aria-label", `${busy} of ${shown.rows.length} rows busy, ${parked} parked in host RAM, ${history.parks} parks seen. The table view has the same in words.`);
}

function everyFrame(nowMs) {
  // The picture moves by pixels: between two of them there is nothing to draw.
  if (!still.matches && (fresh || nowMs - drawnMs >= timeline.pixelMs)) draw();
  requestAnimationFrame(everyFrame);
}

// -- controls ---------------------------------------------------------------------------------------------------

function repaint() {
  cardsMs = 0;
  draw();
}

function setPaused(value) {
  paused = value;
  if (paused) timeline.endS ??= shown ? daemonNow() : null;
  else timeline.endS = null;
  byId("pause").setAttribute("aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Go live" : "Pause");
  repaint();
}

function zoom(by) {
  const place = SPANS_S.indexOf(timeline.spanS) + by;
  timeline.spanS = SPANS_S[Math.min(Math.max(place, 0), SPANS_S.length - 1)];
  setText(byId("span"), timeline.spanS < 60 ? `${timeline.spanS} s` : `${timeline.spanS / 60} min`);
  repaint();
}

function move(byS) {
  if (!shown) return;
  if (!paused) setPaused(true);
  const end = Math.max((timeline.endS ?? daemonNow()) + byS, (history.since ?? 0) + 1);
  timeline.endS = Math.min(end, daemonNow());
  repaint();
}

function press(selector, name, value) {
  for (const one of document.querySelectorAll(selector)) one.setAttribute("aria-pressed", String(one.dataset[name] === value));
}

function setColour(value) {
  colourBy = value;
  press("[data-colour]", "colour", value);
  repaint();
}

function setView(value) {
  view = value;
  press("[data-view]", "view", value);
  byId("timeline").hidden = view !== "lanes";
  byId("table-view").hidden = view !== "table";
  repaint();
}

function follow(query) {
  timeline.followed = query ? keyOf(query) : null;
  setText(byId("followed"), query ? `Following ${queryName(query)} of ${query.tenant}, ${query.sla}.` : "");
  repaint();
}

function followNext(by) {
  if (!shown) return;
  const all = [...shown.rows.filter(Boolean), ...shown.queries.filter((query) => query.state === "parked")];
  const place = all.findIndex((query) => keyOf(query) === timeline.followed);
  if (all.length) follow(all[place < 0 ? (by > 0 ? 0 : all.length - 1) : (place + by + all.length) % all.length]);
}

byId("pause").addEventListener("click", () => setPaused(!paused));
byId("narrower").addEventListener("click", () => zoom(-1));
byId("wider").addEventListener("click", () => zoom(1));
byId("earlier").addEventListener("click", () => move(-timeline.spanS / 4));
byId("later").addEventListener("click", () => move(timeline.spanS / 4));
for (const one of document.querySelectorAll("[data-colour]")) one.addEventListener("click", () => setColour(one.dataset.colour));
for (const one of document.querySelectorAll("[data-view]")) one.addEventListener("click", () => setView(one.dataset.view));

// Single keys work in the batch alone, where they can't be in anybody's way.
const KEYS = {
  " ": () => setPaused(!paused),
  "+": () => zoom(-1),
  "=": () => zoom(-1),
  "-": () => zoom(1),
  ArrowLeft: () => move(-timeline.spanS / 4),
  ArrowRight: () => move(timeline.spanS / 4),
  ArrowDown: () => followNext(1),
  ArrowUp: () => followNext(-1),
  End: () => setPaused(false),
  c: () => setColour(colourBy === "class" ? "tenant" : "class"),
  t: () => setView(view === "lanes" ? "table" : "lanes"),
};
for (const place of ["timeline", "table-view"]) {
  byId(place).addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target !== event.currentTarget) return;
    const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || (place === "table-view" && event.key.startsWith("Arrow"))) return;
    event.preventDefault();
    act();
    if (event.key.toLowerCase() === "t") byId(view === "lanes" ? "timeline" : "table-view").focus();
  });
}

addEventListener("keydown", (event) => event.key === "Escape" && follow(null));

for (const place of ["waiting-table", "row-table", "parked-table", "events"]) {
  byId(place).addEventListener("click", (event) => {
    const key = event.target.dataset?.key;
    if (key === undefined) return;
    const all = [...(shown?.rows ?? []), ...(shown?.queries ?? []), ...history.events];
    const found = all.find((query) => query?.job !== undefined && keyOf(query) === key);
    follow(found && timeline.followed !== key ? found : null);
  });
}

byId("timeline").addEventListener("pointermove", (event) => {
  const box = byId("canvas").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const one = shown ? timeline.at(x, y) : null;
  const tip = byId("tip");
  tip.hidden = !one;
  if (!one) return;
  const place = one.place === "row" ? `row ${one.lane}` : `host RAM${one.held ? ", parked by hand" : ""}`;
  const tokens = one.most ? `${one.output} of ${one.most} tokens` : `${one.output ?? 0} tokens`;
  replace(tip, make("b", {}, make("bdi", {}, queryName(one))), make("div", {}, make("bdi", {}, one.tenant), ", ", one.sla), make("div", {}, `${place} for ${seconds((one.open ? daemonNow() : one.end) - one.start)}`), make("div", {}, tokens));
  tip.style.left = `${Math.max(0, Math.min(x + 14, box.width - 220))}px`;
  tip.style.top = `${Math.min(y + 18, box.height - 84)}px`;
});
byId("timeline").addEventListener("pointerleave", () => (byId("tip").hidden = true));
byId("timeline").addEventListener("click", (event) => {
  const box = byId("canvas").getBoundingClientRect();
  const one = shown ? timeline.at(event.clientX - box.left, event.clientY - box.top) : null;
  follow(one && timeline.followed !== one.key ? one : null);
});

const THEMES = ["auto", "dark", "light"];
function setTheme(value) {
  document.documentElement.dataset.theme = value;
  try {
    localStorage.setItem("batond.theme", value);
  } catch {
    // It holds until the page is left.
  }
  readTheme();
}
function readTheme() {
  timeline.theme = themeColours(document.body);
  setText(byId("theme"), `Theme: ${document.documentElement.dataset.theme}`);
  repaint();
}
byId("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));
for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) matchMedia(query).addEventListener("change", readTheme);
new ResizeObserver(repaint).observe(byId("timeline"));

readTheme();
setInterval(drawLink, 1000);
requestAnimationFrame(everyFrame);
open(0);

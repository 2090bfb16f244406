// The batch over time, put together from snapshots. Pure: no document, no clock of its own. Bounded: what is older
// than `maxAgeS`, or more than `maxSegments` pieces, is forgotten.
//
// A segment is one stay of a query in a place: a row, or a lane of host RAM while it is parked.
//   {key, job, choice, tenant, sla, place: "row"|"host", lane, start, end, open, from, to, ...}
// `from` and `to` are the segments it was handed over from and to, so that parks and resumes can be drawn.

const MOST_EVENTS = 100;
const RATE_S = 5;
const PRUNE_EVERY_S = 2;
const CLOCK_SLACK_S = 2;

/** Job ids are unique for a tenant only. */
export const keyOf = (query) => `${query.tenant}\n${query.job}#${query.choice}`;

export class History {
  constructor({ maxAgeS = 600, maxSegments = 20000 } = {}) {
    this.maxAgeS = maxAgeS;
    this.maxSegments = maxSegments;
    this.clear();
  }

  /** Forgets everything. */
  clear() {
    this.rows = []; // Of each row: its segments, oldest first.
    this.host = []; // Segments of parked queries, by their start.
    this.waiting = []; // {t, total, by: {class: count}}, where it changed.
    this.gaps = []; // {start, end}: nothing is known of it.
    this.events = []; // Hand-overs, newest first.
    this.size = 0;
    this.since = null; // When the first snapshot was taken.
    this.now = null; // When the last one was.
    this.step = 0;
    this.parks = 0; // Seen, since the page was opened.
    this.resumes = 0;
    this._parked = new Map(); // By key: the open segment in host RAM.
    this._left = new Map(); // By key: where queries were last that are neither parked nor in a row just now.
    this._emitted = [{ t: 0, tokens: 0 }];
    this._interrupted = false;
    this._pruned = 0;
  }

  /** The feed is lost: what happens now is not seen. */
  interrupted() {
    this._interrupted = true;
  }

  /** Takes a snapshot; see frames.py for its fields. */
  add(frame) {
    let t = frame.time;
    if (this.now !== null && t < this.now - CLOCK_SLACK_S) this.clear(); // Another clock: nothing fits together.
    if (this.now !== null) t = Math.max(t, this.now);
    this.since ??= t;
    if (this.now !== null && (this._interrupted || frame.step < this.step)) this._break(t, frame.step < this.step);
    this._interrupted = false;
    this.step = frame.step;
    const parked = new Map(frame.queries.filter((query) => query.state === "parked").map((query) => [keyOf(query), query]));
    this._endRows(frame.rows, t);
    this._endParks(parked, frame, t);
    const begun = this._beginRows(frame.rows, t);
    this._beginParks(parked, begun, t);
    this._countWaiting(frame, t);
    this._countTokens(t);
    this.now = t;
    if (t - this._pruned > PRUNE_EVERY_S) this.prune(t);
  }

  /** Tokens a second over the last seconds, of all rows. */
  get tokensPerS() {
    const first = this._emitted[0];
    const last = this._emitted[this._emitted.length - 1];
    return last.t - first.t > 0.2 && first.t ? (last.tokens - first.tokens) / (last.t - first.t) : null;
  }

  /** How many lanes host RAM needs for what is seen of [start, end]. */
  hostLanes(start, end) {
    return this.host.reduce((most, one) => (one.end >= start && one.start <= end ? Math.max(most, one.lane + 1) : most), 0);
  }

  /** Forgets what is too old, or too much. */
  prune(t) {
    this._pruned = t;
    let horizon = t - this.maxAgeS;
    this._dropBefore(horizon);
    while (this.size > this.maxSegments && t - horizon > 1) {
      horizon += (t - horizon) / 8;
      this._dropBefore(horizon);
    }
    this.since = Math.max(this.since, horizon);
  }

  _dropBefore(horizon) {
    const keep = (one) => {
      if (one.open || one.end >= horizon) return true;
      // Else a chain of hand-overs would keep what was forgotten in memory.
      if (one.to) one.to.from = null;
      if (one.from) one.from.to = null;
      return false;
    };
    this.rows = this.rows.map((segments) => segments.filter(keep));
    this.host = this.host.filter(keep);
    for (const [key, one] of this._left) if (one.end < horizon) this._left.delete(key);
    this.gaps = this.gaps.filter((gap) => gap.end >= horizon);
    const first = this.waiting.findLastIndex((one) => one.t <= horizon);
    if (first > 0) this.waiting.splice(0, first);
    this.size = this.host.length + this.rows.reduce((sum, segments) => sum + segments.length, 0);
  }

  _break(t, restarted) {
    if (t - this.now > 0.5) this.gaps.push({ start: this.now, end: t });
    for (const segments of this.rows) close(segments.at(-1), this.now);
    for (const one of this._parked.values()) close(one, this.now);
    this._parked.clear();
    this._left.clear();
    this._emitted = [{ t: 0, tokens: 0 }];
    this._note({ t, kind: restarted ? "restart" : "gap", seconds: t - this.now });
  }

  _endRows(rows, t) {
    this.rows.forEach((segments, row) => {
      const open = segments.at(-1);
      if (!open?.open) return;
      const query = rows[row];
      if (query && keyOf(query) === open.key) return;
      close(open, t);
      this._left.set(open.key, open);
    });
  }

  _endParks(parked, frame, t) {
    const alive = new Set(frame.queries.map(keyOf));
    for (const query of frame.rows) if (query) alive.add(keyOf(query));
    for (const [key, one] of this._parked) {
      if (parked.has(key)) continue;
      close(one, t);
      this._parked.delete(key);
      this._left.set(key, one); // In a row now, or on its way to one.
      if (!alive.has(key)) this._note({ t, kind: "gone", ...whose(one), seconds: t - one.start });
    }
    for (const key of this._left.keys()) if (!alive.has(key)) this._left.delete(key);
  }

  _beginRows(rows, t) {
    const begun = new Map(); // By row.
    while (this.rows.length < rows.length) this.rows.push([]);
    rows.forEach((query, row) => {
      if (!query) return;
      const segments = this.rows[row];
      let open = segments.at(-1);
      if (!open?.open) {
        open = this._begin(query, "row", row, t);
        open.tokensAtStart = query.output;
        segments.push(open);
        begun.set(row, open);
        this._link(this._left.get(open.key), open, t);
        this._left.delete(open.key);
      }
      open.end = t;
      this._more = (this._more ?? 0) + Math.max(0, query.output - (open.output ?? query.output));
      open.output = query.output;
      open.most = query.max;
      open.cached = query.cached;
    });
    return begun;
  }

  _link(park, open, t) {
    if (park?.place !== "host") return;
    park.to = open;
    open.from = park;
    this.resumes += 1;
    this._note({ t, kind: "resume", ...whose(open), row: open.lane, seconds: t - park.start });
  }

  _beginParks(parked, begun, t) {
    for (const [key, query] of parked) {
      let open = this._parked.get(key);
      if (!open) {
        open = this._begin(query, "host", this._freeLane(), t);
        this.host.push(open);
        this._parked.set(key, open);
        const row = this._left.get(key);
        this._left.delete(key);
        if (row?.place === "row") {
          open.from = row;
          open.from.to = open;
          this.parks += 1;
          const taker = begun.get(open.from.lane);
          this._note({ t, kind: "park", ...whose(open), row: open.from.lane, bytes: query.bytes, held: query.held,
            taker: taker && whose(taker) });
        }
      }
      open.end = t;
      open.output = query.output;
      open.most = query.max;
      open.bytes = query.bytes;
      open.parks = query.parks;
      open.held = query.held;
    }
  }

  _begin(query, place, lane, t) {
    this.size += 1;
    return { key: keyOf(query), ...whose(query), place, lane, start: t, end: t, open: true, from: null, to: null };
  }

  _freeLane() {
    const taken = new Set([...this._parked.values()].map((one) => one.lane));
    let lane = 0;
    while (taken.has(lane)) lane += 1;
    return lane;
  }

  _countWaiting(frame, t) {
    const by = {};
    let total = frame.queued;
    for (const query of frame.queries) {
      if (query.state === "parked") continue;
      by[query.sla] = (by[query.sla] ?? 0) + 1;
      total += 1;
    }
    const last = this.waiting.at(-1);
    if (!last || JSON.stringify([last.total, last.by]) !== JSON.stringify([total, by])) this.waiting.push({ t, total, by });
    if (this.waiting.length > this.maxSegments) this.waiting.splice(0, this.waiting.length - this.maxSegments);
  }

  _countTokens(t) {
    const tokens = this._emitted.at(-1).tokens + (this._more ?? 0);
    this._more = 0;
    if (this._emitted[0].t === 0) this._emitted = [];
    this._emitted.push({ t, tokens });
    while (this._emitted.length > 2 && this._emitted[0].t < t - RATE_S) this._emitted.shift();
  }

  _note(event) {
    this.events.unshift(event);
    this.events.length = Math.min(this.events.length, MOST_EVENTS);
  }
}

function whose({ job, choice, tenant, sla }) {
  return { job, choice, tenant, sla };
}

function close(segment, t) {
  if (!segment?.open) return;
  segment.open = false;
  segment.end = t;
}

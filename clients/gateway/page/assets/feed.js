// The stream of events, over fetch: an EventSource can't send a header, and a token has no place in an address.

const SILENCE_MS = 12000; // The gateway says something every five seconds.
const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 15000;
const LONGEST_EVENT = 8 << 20; // Characters; a batch of thousands of rows has less.

/** The gateway refused: no retry helps until somebody gives other credentials. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Cuts a stream of text into server-sent events; see the HTML standard, 9.2.6. Comments only show that it lives. */
export class EventParser {
  #rest = "";

  /** Takes text and returns the events that became whole: `[{kind, data}, ...]`. */
  push(text) {
    this.#rest += text;
    if (this.#rest.length > LONGEST_EVENT) throw new Error("an event is too long");
    const parts = this.#rest.split("\n\n");
    this.#rest = parts.pop();
    const events = [];
    for (const part of parts) {
      let kind = "message";
      const data = [];
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) kind = line.slice(7);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      if (data.length) events.push({ kind, data: JSON.parse(data.join("\n")) });
    }
    return events;
  }
}

/** How long to wait before the n-th attempt in a row, from 1: doubling, and never all viewers at once. */
export function backoffMs(attempt, random = Math.random()) {
  return Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** (attempt - 1)) * (0.75 + random / 2);
}

/**
 * Follows a daemon until told to stop, through broken connections.
 *
 * `on` has: event(kind, data); broken(message, delayMs), before each wait; refused(Refusal), at the end.
 */
export class Feed {
  #stop = new AbortController();
  #wake = () => {};

  constructor(daemon, token, on) {
    this.daemon = daemon;
    this.token = token;
    this.on = on;
  }

  /** Ends it; nothing is called any more. */
  stop() {
    this.#stop.abort();
    this.#wake();
  }

  /** Doesn't wait any longer: somebody asked, or the network is back. */
  retryNow() {
    this.#wake();
  }

  async run() {
    let attempt = 0;
    while (!this.#stop.signal.aborted) {
      let message = "the gateway closed the stream";
      try {
        await this.#once(() => (attempt = 0));
      } catch (error) {
        if (this.#stop.signal.aborted) return;
        if (error instanceof Refusal) return void this.on.refused(error);
        message = error.message;
      }
      if (this.#stop.signal.aborted) return;
      attempt += 1;
      const delayMs = backoffMs(attempt);
      this.on.broken(message, delayMs);
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, delayMs);
        this.#wake = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
  }

  async #once(arrived) {
    const call = new AbortController();
    const stopped = () => call.abort();
    this.#stop.signal.addEventListener("abort", stopped, { once: true });
    let silence;
    const alive = () => {
      clearTimeout(silence);
      silence = setTimeout(() => call.abort(), SILENCE_MS);
    };
    try {
      alive();
      const headers = this.token ? { Authorization: `Bearer ${this.token}` } : {};
      const response = await fetch(`api/events?daemon=${this.daemon}`, { headers, signal: call.signal, cache: "no-store", credentials: "omit" });
      if (!response.ok) throw await problemOf(response);
      const parser = new EventParser();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        alive();
        for (const { kind, data } of parser.push(value)) {
          if (this.#stop.signal.aborted) return;
          if (kind === "refused") throw new Refusal(data.status, data.message);
          arrived();
          this.on.event(kind, data);
        }
      }
    } catch (error) {
      if (error.name === "AbortError") throw new Error("nothing was heard for a while");
      throw error instanceof TypeError ? new Error("the gateway can't be reached") : error;
    } finally {
      clearTimeout(silence);
      this.#stop.signal.removeEventListener("abort", stopped);
      call.abort();
    }
  }
}

async function problemOf(response) {
  let message = `the gateway answered ${response.status}`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    // A proxy's own page.
  }
  const final = response.status === 401 || response.status === 403 || response.status === 404;
  return final ? new Refusal(response.status, String(message)) : new Error(String(message));
}

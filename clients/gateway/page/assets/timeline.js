// Draws the batch over time: a lane a row, lanes of host RAM below, and how many wait at the bottom.
import { queryName, clock } from "./format.js";

export const SPANS_S = [5, 10, 20, 30, 60, 120, 300, 600];
const AXIS = 22;
const HOST_TITLE = 20;
const HOST_LANES = 3; // At least, so that the picture doesn't jump with every park.
const MOST_HOST_LANES = 12;
const BUSY = 60; // With more parked segments in sight, lines are thin and have no heads.
const WAITING = 44;
const TICKS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300];
const TICK_PX = 84;

export class Timeline {
  /** `colourOf(segment)` gives a colour's number; `theme` is what themeColours() gives. */
  constructor(canvas, history, colourOf) {
    this.canvas = canvas;
    this.history = history;
    this.colourOf = colourOf;
    this.theme = null;
    this.spanS = 30;
    this.endS = null; // null is live.
    this.followed = null; // The key of a query; the others are dimmed.
    this.rowCount = 0;
  }

  /** Draws [end - span, end]; `nowS` is the daemon's time now, as far as it is known. */
  draw(nowS) {
    const { canvas } = this;
    const width = canvas.clientWidth;
    if (!this.theme || !width) return;
    const ratio = devicePixelRatio || 1;
    this._layOut(width, nowS);
    const height = this.height;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `12px ${getComputedStyle(canvas).fontFamily}`;
    pen.textBaseline = "middle";
    this._drawLanes(pen);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, width - this.left, height);
    pen.clip();
    this._drawGrid(pen);
    const parked = this.history.host.filter((one) => this._seen(one));
    const running = this.history.rows.flatMap((segments) => segments.filter((one) => this._seen(one)));
    this.busy = parked.length > BUSY;
    for (const one of [...running, ...parked]) this._drawSegment(pen, one);
    for (const one of this.history.host) this._drawHandOvers(pen, one);
    for (const one of [...running, ...parked]) this._drawLabel(pen, one);
    this._drawWaiting(pen);
    this._drawUnknown(pen);
    pen.restore();
    this._drawNames(pen);
  }

  /** How long it takes until the picture has moved by a pixel. */
  get pixelMs() {
    return (this.spanS * 1000) / Math.max(1, this.canvas.clientWidth);
  }

  /** The segment at a point of the canvas, or null. */
  at(x, y) {
    if (x < this.left) return null;
    const found = (one) => this._seen(one) && x >= this._x(one.start) - 2 && x <= this._x(this._end(one)) + 2 && y >= this._y(one) && y < this._y(one) + this._tall(one);
    return this.history.host.findLast(found) ?? this.history.rows.flatMap((segments) => segments.filter(found)).at(-1) ?? null;
  }

  _layOut(width, nowS) {
    const { history } = this;
    this.width = width;
    this.left = width < 560 ? 56 : 74;
    this.nowS = nowS;
    this.end = this.endS ?? nowS;
    this.start = this.end - this.spanS;
    const rows = Math.max(this.rowCount, 1);
    this.lane = rows <= 8 ? 26 : rows <= 16 ? 20 : rows <= 40 ? 14 : 8;
    this.hostLane = Math.max(8, Math.round(this.lane * 0.72));
    this.gap = rows <= 16 ? 4 : 2;
    const lanes = Math.min(Math.max(history.hostLanes(this.start, this.end), HOST_LANES), MOST_HOST_LANES);
    // It grows at once and doesn't shrink until the page is opened anew: no jumping.
    this.hostLanes = Math.max(lanes, this.hostLanes ?? 0);
    this.hostTop = AXIS + rows * (this.lane + this.gap) + 6;
    this.waitingTop = this.hostTop + HOST_TITLE + this.hostLanes * (this.hostLane + this.gap) + 8;
    this.height = this.waitingTop + WAITING + 4;
  }

  _x(t) {
    return this.left + ((t - this.start) / this.spanS) * (this.width - this.left);
  }

  _y(one) {
    const top = one.place === "row" ? AXIS : this.hostTop + HOST_TITLE;
    return top + one.lane * (this._tall(one) + this.gap);
  }

  _tall(one) {
    return one.place === "row" ? this.lane : this.hostLane;
  }

  /** Where a segment is drawn: [left, width, top, height]. */
  _box(one) {
    const x = Math.max(this._x(one.start), this.left - 8);
    return [x, Math.max(Math.min(this._x(this._end(one)), this.width + 8) - x - 1, 1.5), this._y(one), this._tall(one)];
  }

  _dim(one, value) {
    return this.followed && this.followed !== one.key ? value : 1;
  }

  _end(one) {
    return one.open ? Math.max(one.end, this.nowS) : one.end;
  }

  _seen(one) {
    return this._end(one) >= this.start && one.start <= this.end && (one.place === "row" || one.lane < this.hostLanes);
  }

  _drawLanes(pen) {
    const { theme } = this;
    pen.fillStyle = theme.lane;
    for (let row = 0; row < this.rowCount; row += 1) pen.fillRect(this.left, AXIS + row * (this.lane + this.gap), this.width - this.left, this.lane);
    pen.fillStyle = theme.host;
    pen.fillRect(this.left, this.hostTop, this.width - this.left, this.waitingTop - this.hostTop - 6);
    pen.fillStyle = theme.line;
    pen.fillRect(0, this.hostTop, this.width, 1);
  }

  _drawGrid(pen) {
    const { theme } = this;
    const most = Math.max(1, (this.width - this.left) / TICK_PX);
    const step = TICKS_S.find((tick) => this.spanS / tick <= most) ?? TICKS_S.at(-1);
    pen.textAlign = "center";
    for (let t = Math.ceil(this.start / step) * step; t <= this.end; t += step) {
      const x = Math.round(this._x(t));
      pen.fillStyle = theme.line;
      pen.fillRect(x, AXIS - 4, 1, this.height - AXIS);
      pen.fillStyle = theme.faint;
      if (x > this.left + 30 && x < this.width - 30) pen.fillText(clock(t), x, AXIS / 2 - 1);
    }
  }

  _drawSegment(pen, one) {
    const [x, width, y, height] = this._box(one);
    const colour = this.theme.colours[this.colourOf(one)];
    pen.globalAlpha = this._dim(one, 0.22);
    pen.beginPath();
    pen.roundRect(x, y, width, height, Math.min(4, width / 2, height / 3));
    pen.fillStyle = one.place === "row" ? colour : this._hatch(pen, colour);
    pen.fill();
    if (one.place === "host" || this.followed === one.key) {
      pen.lineWidth = this.followed === one.key ? 2 : 1.25;
      pen.strokeStyle = this.followed === one.key ? this.theme.ink : colour;
      pen.stroke();
    }
    pen.globalAlpha = 1;
  }

  /** After the hand-overs, on a ground of its own: lines may cross a bar, but not its name. */
  _drawLabel(pen, one) {
    const [x, width, y, height] = this._box(one);
    if (height < 13) return;
    const from = Math.max(x, this.left);
    const room = Math.min(x + width, this.width) - from - 12;
    if (room < 26) return;
    const name = queryName(one);
    const full = one.most ? `${name}  ${one.output ?? 0}/${one.most}` : name;
    const text = pen.measureText(full).width <= room ? full : fit(pen, name, room);
    const running = one.place === "row";
    pen.textAlign = "left";
    pen.globalAlpha = this._dim(one, 0.3);
    pen.fillStyle = running ? this.theme.colours[this.colourOf(one)] : this.theme.host;
    if (!running || pen.globalAlpha === 1) pen.fillRect(from + 3, y + 2, Math.min(pen.measureText(text).width + 7, room + 6), height - 4);
    pen.fillStyle = running ? this.theme.onColour : this.theme.ink;
    pen.fillText(text, from + 6, y + height / 2 + 0.5);
    pen.globalAlpha = 1;
  }

  _hatch(pen, colour) {
    this._hatches ??= new Map();
    const key = `${colour} ${devicePixelRatio}`;
    let found = this._hatches.get(key);
    if (!found) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 8;
      const small = tile.getContext("2d");
      small.strokeStyle = colour;
      small.globalAlpha = 0.6;
      small.lineWidth = 2;
      for (const shift of [-8, 0, 8]) {
        small.beginPath();
        small.moveTo(shift, 8);
        small.lineTo(shift + 8, 0);
        small.stroke();
      }
      found = pen.createPattern(tile, "repeat");
      if (this._hatches.size > 40) this._hatches.clear();
      this._hatches.set(key, found);
    }
    return found;
  }

  /** A park goes down from the row, a resume goes up to it: a line in the query's colour, with an arrow. */
  _drawHandOvers(pen, park) {
    if (park.lane >= this.hostLanes) return;
    pen.globalAlpha = this._dim(park, 0.15);
    const colour = this.theme.colours[this.colourOf(park)];
    if (park.from) this._drawArrow(pen, park.from.end, this._y(park.from) + this.lane, park.start, this._y(park), 1, colour);
    if (park.to) this._drawArrow(pen, park.end, this._y(park), park.to.start, this._y(park.to) + this.lane, -1, colour);
    pen.globalAlpha = 1;
  }

  _drawArrow(pen, t0, y0, t1, y1, down, colour) {
    const [x0, x1] = [this._x(t0), this._x(t1)];
    if (Math.max(x0, x1) < this.left - 20 || Math.min(x0, x1) > this.width + 20) return;
    const bow = Math.min(9, Math.abs(y1 - y0) / 4);
    const tip = y1 - down * 1;
    const path = () => {
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.bezierCurveTo(x0 + bow, y0 + (tip - y0) * 0.3, x1 + bow, y0 + (tip - y0) * 0.7, x1, tip - down * 6);
      pen.stroke();
    };
    pen.lineCap = "round";
    if (!this.busy) {
      pen.strokeStyle = this.theme.card;
      pen.lineWidth = 4.5;
      path();
    }
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = this.busy ? 1 : 2;
    path();
    if (this.busy) return;
    pen.beginPath();
    pen.arc(x0, y0, 3, 0, Math.PI * 2);
    pen.fill();
    pen.beginPath();
    pen.moveTo(x1, tip);
    pen.lineTo(x1 - 5, tip - down * 8);
    pen.lineTo(x1 + 5, tip - down * 8);
    pen.fill();
  }

  _drawWaiting(pen) {
    const { theme, history } = this;
    const samples = history.waiting;
    const base = this.waitingTop + WAITING;
    const first = Math.max(0, samples.findLastIndex((one) => one.t <= this.start));
    const shown = samples.slice(first).filter((one) => one.t <= this.end);
    const most = Math.max(4, ...shown.map((one) => one.total));
    pen.fillStyle = theme.line;
    pen.fillRect(this.left, base, this.width - this.left, 1);
    shown.forEach((one, place) => {
      const x0 = Math.max(this._x(one.t), this.left);
      const x1 = Math.min(this._x(shown[place + 1]?.t ?? Math.min(this.nowS, this.end)), this.width);
      const height = (one.total / most) * (WAITING - 8);
      if (x1 <= x0 || !height) return;
      pen.fillStyle = theme.faint;
      pen.globalAlpha = 0.28;
      pen.fillRect(x0, base - height, x1 - x0, height);
      pen.globalAlpha = 0.9;
      pen.fillRect(x0, base - height, x1 - x0, 1.5);
      pen.globalAlpha = 1;
    });
    this.mostWaiting = most;
  }

  /** Before the page was opened, and while the feed was lost. */
  _drawUnknown(pen) {
    const { history, theme } = this;
    const unknown = [...history.gaps];
    if (history.since !== null && history.since > this.start) unknown.push({ start: this.start - 1, end: history.since, early: true });
    for (const gap of unknown) {
      const x0 = Math.max(this._x(gap.start), this.left);
      const x1 = Math.min(this._x(gap.end), this.width);
      if (x1 - x0 < 1) continue;
      pen.fillStyle = theme.card;
      pen.globalAlpha = 0.8;
      pen.fillRect(x0, AXIS, x1 - x0, this.height - AXIS);
      pen.globalAlpha = 1;
      const text = gap.early ? "not watched yet" : "nothing heard";
      if (x1 - x0 > pen.measureText(text).width + 12) {
        pen.fillStyle = theme.faint;
        pen.textAlign = "center";
        pen.fillText(text, (x0 + x1) / 2, AXIS + 16);
      }
    }
  }

  _drawNames(pen) {
    const { theme } = this;
    pen.textAlign = "left";
    pen.fillStyle = theme.faint;
    const every = Math.ceil(13 / (this.lane + this.gap));
    for (let row = 0; row < this.rowCount; row += every) {
      const name = this.left < 60 ? `r${row}` : `row ${row}`;
      pen.fillText(name, 6, AXIS + row * (this.lane + this.gap) + this.lane / 2 + 0.5);
    }
    pen.fillStyle = theme.ink;
    pen.fillText(this.left < 60 ? "host" : "host RAM", 6, this.hostTop + HOST_TITLE / 2 + 1);
    pen.fillStyle = theme.faint;
    const hidden = this.history.host.filter((one) => one.open && one.lane >= this.hostLanes).length;
    if (hidden) pen.fillText(`and ${hidden} more parked`, this.left + 6, this.hostTop + HOST_TITLE / 2 + 1);
    pen.fillText("waiting", 6, this.waitingTop + WAITING - 10);
    const last = this.history.waiting.findLast((one) => one.t <= this.end);
    if (last) {
      pen.fillStyle = theme.ink;
      pen.fillText(String(last.total), 6, this.waitingTop + WAITING - 26);
    }
  }
}

/** As much of a text as there is room for. */
function fit(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let [low, high] = [0, Math.min(text.length, 200)];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (pen.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low ? `${text.slice(0, low)}…` : "";
}

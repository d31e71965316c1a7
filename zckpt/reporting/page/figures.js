/* How are the figures of a report drawn?

The page carries its document, compressed; it is unpacked once. Each figure is a `Grid`: a canvas
whose cells a view paints and describes, by pointer and by keyboard alike. Below each figure is a
table, which is filled when it is opened. Names come from the files of strangers: they are set as
text, never as HTML. */
"use strict";

const UNSEEN = /[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]|\p{Cs}/gu;
let PALETTE; // even steps of lightness, from the page

const one = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const number = new Intl.NumberFormat("en").format;
const product = (shape) => (shape ?? []).reduce((left, right) => left * right, 1);

/* ---- texts */

function shown(value) {
  return String(value).replace(UNSEEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return Array.isArray(value) ? value.join(" × ") : shown(value);
  if (Number.isInteger(value)) return number(value);
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(3)))
    : value.toExponential(2).replace("e+", "e");
}

const superscript = (power) => String(power).replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);

function sized(bytes) {
  const power = clamp(Math.floor(Math.log10(Math.max(bytes, 1)) / 3), 0, 4);
  return `${Number((bytes / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

/** An element with these attributes and children; texts become text. */
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** The name of a layer: `h.0` for the row 0. */
const layerName = (row) => (Object.hasOwn(report.layers ?? {}, row) ? report.layers[row] : row);

const name = (text) => make("bdi", {}, shown(text));

/* ---- colors */

const css = (key) => getComputedStyle(document.documentElement).getPropertyValue(`--${key}`).trim();

/** The color of 0 to 1, as [red, green, blue]: what is large stands out from the page. */
function color(part) {
  const place = clamp(css("dark") ? 0.08 + 0.92 * part : 1 - part, 0, 1) * (PALETTE.length - 1);
  const below = Math.min(Math.floor(place), PALETTE.length - 2);
  return PALETTE[below].map((low, i) => Math.round(low + (PALETTE[below + 1][i] - low) * (place - below)));
}

/** From values to 0 to 1; by powers of ten if they span more than one and a half. */
function scale(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null || value === 0) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  const log = low > 0 && high > 30 * low;
  const by = log ? Math.log10 : (value) => value;
  return { low, high, log, at: (value) => (high > low ? (by(value) - by(low)) / (by(high) - by(low)) : 0.5) };
}

/** Colors of 64 steps, computed once for a drawing: a page has up to 50,000 cells. */
const ramp = () => Array.from({ length: 65 }, (_, step) => color(step / 64));

function hatch(context, ink) {
  const tile = make("canvas", { width: 6, height: 6 });
  const pen = tile.getContext("2d");
  pen.strokeStyle = ink;
  pen.lineWidth = 1.4;
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift, 6);
    pen.lineTo(shift + 6, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

/** A sign that is seen on every color: with a rim, and never smaller than it can be read. */
function sign(context, text, x, y, size = 13) {
  context.font = `700 ${Math.max(size, 11)}px ${css("sans")}`;
  context.textAlign = "center";
  context.lineWidth = 4;
  context.lineJoin = "round";
  context.strokeStyle = css("panel");
  context.strokeText(text, x, y + 0.5);
  context.fillStyle = css("fault");
  context.fillText(text, x, y + 0.5);
}

/* ---- a figure of cells */

class Grid {
  static drawn = [];

  constructor(figure) {
    this.figure = figure;
    for (const part of ["stage", "ring", "tip", "says", "legend"]) this[part] = one(`.${part}`, figure);
    this.canvas = one("canvas", figure);
    const at = (event) => this.at(event.offsetX, event.offsetY);
    this.canvas.addEventListener("pointermove", (event) => Grid.moved && this.point(at(event)));
    this.canvas.addEventListener("pointerleave", () => this.spoken || this.point(null));
    this.canvas.addEventListener("click", (event) => this.enter(at(event)));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("focus", () => this.canvas.matches(":focus-visible") && this.point(this.cell, true));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.stage.clientWidth !== this.room && this.draw()).observe(this.stage);
    Grid.drawn.push(this);
  }

  show(view) {
    this.view = view;
    this.cell = [0, 0];
    this.point(null);
    this.draw();
  }

  draw() {
    const { rows, columns } = this.view;
    this.room = this.stage.clientWidth;
    const room = this.room - 6; // without the padding
    if (room < 1 || !rows.length || !columns.length) return;
    const context = this.canvas.getContext("2d");
    const font = (context.font = `12px ${css("sans")}`);
    const fit = (text, most) => {
      text = shown(text).slice(0, 400);
      for (let keep = text.length; context.measureText(text).width > most; ) {
        keep = Math.floor(keep * 0.9);
        text = `${text.slice(0, Math.ceil(keep / 2))}…${text.slice(-Math.floor(keep / 2))}`;
      }
      return text;
    };
    const widest = (texts) => Math.max(...texts.map((text) => context.measureText(text).width));
    const names = rows.map((row) => fit(row, room < 620 ? 112 : 270));
    const heads = columns.map((column) => fit(column, 150));
    const left = (this.left = Math.ceil(widest(names)) + 10);
    let wide = (room - left - 2) / columns.length;
    const longest = widest(heads), tilted = longest > Math.min(wide, this.view.widest ?? 112) - 4;
    if (tilted) wide = (room - left - longest * 0.5) / columns.length;
    wide = this.wide = clamp(wide, Math.min(this.view.least ?? 3, 15000 / columns.length), this.view.widest ?? 112);
    const tall = (this.tall = clamp((this.view.height ?? 620) / rows.length, 1, this.view.tallest ?? 24));
    const top = (this.top = tilted ? Math.ceil(longest * 0.72) + 14 : 22);
    const width = Math.max(Math.ceil(left + wide * columns.length + (tilted ? longest * 0.5 : 2)), 1);
    const height = Math.ceil(top + tall * rows.length + 2);
    const sharp = Math.min(window.devicePixelRatio || 1, 16000 / Math.max(width, height));
    Object.assign(this.canvas, { width: Math.round(width * sharp), height: Math.round(height * sharp) });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    context.scale(sharp, sharp);
    context.font = font;
    context.textBaseline = "middle";
    context.fillStyle = css("muted");
    const box = (row, column) => [left + wide * column, top + tall * row, wide, tall];
    context.textAlign = "right";
    names.forEach((text, row) => {
      if (row % Math.ceil(13 / tall)) return;
      context.fillStyle = css(/^[≠✕▨]/u.test(text) ? "fault" : "muted");
      context.fillText(text, left - 8, top + tall * (row + 0.5));
    });
    context.fillStyle = css("muted");
    context.textAlign = tilted ? "left" : "center";
    heads.forEach((text, column) => {
      if (column % Math.ceil((tilted ? 15 : 4) / wide)) return;
      context.save();
      context.translate(left + wide * (column + 0.5), top - 10);
      if (tilted) context.rotate(-Math.PI / 4);
      context.fillText(text, 0, 0);
      context.restore();
    });
    this.view.paint(context, box);
    this.legend.replaceChildren(...this.view.legend());
  }

  at(x, y) {
    const row = Math.floor((y - this.top) / this.tall), column = Math.floor((x - this.left) / this.wide);
    const inside = row >= 0 && column >= 0 && row < this.view.rows.length && column < this.view.columns.length;
    return inside ? [row, column] : null;
  }

  /** Shows what a cell is, beside it and for a screen reader; null for no cell. */
  point(cell, spoken = false) {
    const lines = cell && this.view.says(...cell);
    this.spoken = spoken;
    this.ring.hidden = this.tip.hidden = !lines;
    if (!lines) return;
    this.cell = cell;
    const x = this.left + this.wide * cell[1], y = this.top + this.tall * cell[0];
    const place = { left: `${x}px`, top: `${y}px`, width: `${this.wide}px`, height: `${this.tall}px` };
    Object.assign(this.ring.style, place);
    if (spoken) { // bring a cell that the keyboard reaches into sight
      const seen = this.stage.clientWidth - this.wide - 8;
      this.stage.scrollLeft = clamp(this.stage.scrollLeft, x - seen, x - 8);
    }
    this.says.textContent = lines.map(shown).join(", ");
    this.tip.replaceChildren(...lines.map((line, i) => make(i ? "p" : "strong", {}, name(line))));
    const room = this.figure.clientWidth - this.tip.offsetWidth;
    const start = x + this.wide / 2 - this.stage.scrollLeft - this.tip.offsetWidth / 2;
    this.tip.style.left = `${clamp(start, 0, Math.max(room, 0))}px`;
    this.tip.style.top = `${this.stage.offsetTop + y + this.tall + 8}px`;
  }

  enter(cell) {
    if (cell) this.view.enter?.(...cell);
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      Home: [0, -Infinity], End: [0, Infinity] };
    const move = moves[event.key];
    if (!this.view.rows.length || !this.view.columns.length) return;
    if (move) {
      const sizes = [this.view.rows.length, this.view.columns.length];
      const first = this.ring.hidden; // the first key shows where one is
      this.point(this.cell.map((at, i) => clamp(at + (first ? 0 : move[i]), 0, sizes[i] - 1)), true);
    } else if (event.key === "Enter" || event.key === " ") {
      this.enter(this.cell);
    } else if (event.key === "Escape") {
      this.point(null);
      this.view.back?.();
    } else return;
    event.preventDefault();
  }
}

// A page that scrolls under a resting pointer sends events too: they must not take over.
document.addEventListener("pointermove", ({ screenX, screenY }) => {
  const where = `${screenX} ${screenY}`;
  Grid.moved = where !== Grid.pointer;
  Grid.pointer = where;
}, true);

/** What a color means, and the signs of a figure. */
function legend(measured, title, signs = []) {
  const strip = make("canvas", { width: 130, height: 10, class: "ramp", "aria-hidden": "true" });
  const pen = strip.getContext("2d");
  ramp().forEach((rgb, step) => {
    pen.fillStyle = `rgb(${rgb})`;
    pen.fillRect(step * 2, 0, 2, 10);
  });
  const ends = Number.isFinite(measured.low)
    ? [make("span", {}, short(measured.low)), strip, make("span", {}, short(measured.high))] : [];
  return [make("span", { class: "title" }, title), ...ends,
    make("span", { class: "quiet" }, measured.log ? "by powers of ten" : "linear"),
    ...signs.map(([mark, text]) => signed(mark, text))];
}

const signed = (mark, text) => make("span", {}, make("b", { class: "sign" }, mark), ` ${text}`);

/** How many times more or less each value is than the median of its column. */
function apart(cells) {
  const columns = new Map();
  for (const [, column, value] of cells) {
    if (value) columns.set(column, [...(columns.get(column) ?? []), value]);
  }
  for (const [column, values] of columns) {
    const [low, high] = [(values.length - 1) >> 1, values.length >> 1];
    values.sort((left, right) => left - right);
    columns.set(column, values.length > 2 ? (values[low] + values[high]) / 2 : null); // too few to compare
  }
  return ([, column, value]) => {
    const middle = columns.get(column);
    return value && middle ? Math.max(value / middle, middle / value) : value && 1;
  };
}

/** Cells of numbers: `cells` has [row, column, value, tensor] each; `by` is what gives the color. */
function heat(rows, columns, cells, title, options) {
  const { by = (cell) => cell[2], signs = new Map(), kinds = {}, zero = "0", says, enter, ...sizes } = options;
  const at = new Map(cells.map((cell) => [cell[0] * columns.length + cell[1], cell]));
  const measured = scale(cells.map(by));
  const used = new Set(cells.flatMap((cell) => signs.get(cell[3]) ?? []));
  return {
    rows, columns, ...sizes,
    paint(context, box) {
      const colors = ramp(), lines = hatch(context, css("faint")), marked = [];
      const [page, ink, sans] = [css("hollow"), css("muted"), css("sans")];
      context.textAlign = "center";
      context.font = `11px ${sans}`;
      for (const cell of cells) {
        const [row, column, value, tensor] = cell;
        const [x, y, wide, tall] = box(row, column);
        const gap = wide > 6 && tall > 6 ? 1 : 0;
        const rgb = value && colors[Math.round(64 * measured.at(by(cell)))];
        context.fillStyle = rgb ? `rgb(${rgb})` : value === 0 ? page : lines;
        context.fillRect(x, y, wide - gap, tall - gap);
        if (signs.has(tensor)) marked.push([x, y, wide - gap, tall - gap, signs.get(tensor)]);
        else if (wide > 50 && tall > 15) {
          const light = rgb && rgb[0] * 0.3 + rgb[1] * 0.59 + rgb[2] * 0.11 > 118;
          context.fillStyle = rgb ? (light ? "#10141a" : "#fff") : ink;
          context.fillText(value === 0 ? zero : short(value), x + wide / 2, y + tall / 2 + 0.5);
        }
      }
      for (const [x, y, wide, tall, kind] of marked) {
        context.strokeStyle = css("fault");
        context.lineWidth = 2;
        context.strokeRect(x + 1, y + 1, Math.max(wide - 2, 1), Math.max(tall - 2, 1));
        sign(context, kinds[kind] ?? "!", x + wide / 2, y + tall / 2, Math.min(tall - 4, 14));
      }
    },
    legend: () => legend(measured, title, [...used].map((kind) => [kinds[kind] ?? "!", kind])),
    says: (row, column) => says(row, column, at.get(row * columns.length + column)),
    enter: enter && ((row, column) => enter(at.get(row * columns.length + column))),
  };
}

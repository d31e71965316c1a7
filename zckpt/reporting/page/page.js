/* What do the figures of this page show? The views of numbers, masters, changes and runs, and the
start: the document is unpacked, and every figure drawn. */

let report; // the document
let kinds = {}; // the sign of each kind of fault
const signs = new Map(); // tensor -> the kind of its worst fault
const wrong = new Map(); // tensor -> sentences
const grids = {};

const field = (key, tensor) => report.tensors?.[key]?.[tensor];

/* ---- numbers */

const FIELDS = ["name", "dtype", "shape", "bytes", "min", "max", "mean", "std", "nan", "inf", "zero", "denormal"];

function numbers({ numbers: key, apart: relative }) {
  const { columns, measures } = report.numbers;
  const rows = report.numbers.rows.map(layerName);
  const measure = measures.find((one) => one.key === key) ?? measures[0];
  const title = measure.unit ? `${measure.title} (${measure.unit})` : measure.title;
  const known = FIELDS.filter((key) => report.tensors?.[key]);
  tables.numbers = () => ({
    columns: ["layer", "kind", title, ...known],
    rows: measure.cells.map(([row, column, size, tensor]) =>
      [rows[row], columns[column], size, ...known.map((key) => report.tensors[key][tensor] ?? null)]),
    bad: (place) => signs.has(measure.cells[place][3]),
  });
  const says = (row, column, cell) => {
    const place = `${rows[row]} ${columns[column]}`;
    if (!cell) return [place, "no such tensor"];
    const [, , value, tensor] = cell;
    const kind = field("dtype", tensor);
    return [field("name", tensor) ?? place,
      `${measure.title}: ${value === null ? "no finite value" : short(value)}`,
      ...(kind ? [`${kind}, ${short(field("shape", tensor))}, ${sized(field("bytes", tensor))}`] : []),
      ...(wrong.get(tensor) ?? [])];
  };
  const enter = (cell) => {
    const told = cell ? known.filter((key) => (field(key, cell[3]) ?? null) !== null) : [];
    const text = (key) => (key === "bytes" ? sized(field(key, cell[3])) : short(field(key, cell[3])));
    one(".detail").replaceChildren(
      make("dl", {}, ...told.map((key) => make("div", {}, make("dt", {}, key), make("dd", {}, name(text(key)))))),
      ...(wrong.get(cell?.[3]) ?? []).map((line) => make("p", { class: "bad" }, name(line))));
  };
  const about = relative ? `${title}: times from the column's median` : title;
  const by = relative ? { by: apart(measure.cells) } : {};
  return heat(rows, columns, measure.cells, about, { signs, kinds, says, enter, ...by });
}

/* ---- masters, changes, and a run */

/** Counts of elements: no text where there are none. */
const counts = (rows, columns, count, title, says) => heat(rows, columns,
  rows.flatMap((_, row) => columns.map((_, column) => [row, column, count(row, column), null])),
  title, { zero: "", height: 420, says });

function masters() {
  const { rows, bins } = report.masters;
  const names = rows.map(({ worst, layer }) => (worst ? `≠ ${layerName(layer)}` : layerName(layer)));
  return counts(names, bins, (row, bin) => rows[row].counts[bin], "elements by distance in ULP", (row, bin, cell) => {
    const { layer, worst, tensor } = rows[row];
    const farthest = worst ? [`farthest: ${short(worst)} ULP in ${field("name", tensor) ?? "?"}`] : [];
    return [`layer ${layerName(layer)}`, `${number(cell[2])} elements are ${bins[bin]} ULP away`, ...farthest];
  });
}

function changes() {
  const { layers, histograms } = report.against;
  const known = histograms.filter(Boolean);
  const first = Math.min(...known.map((each) => each.first));
  const size = Math.max(...known.map((each) => each.first + each.counts.length)) - first;
  const powers = Array.from({ length: size }, (_, place) => `2${superscript(first + place)}`);
  const count = (row, place) => histograms[row]?.counts[first + place - histograms[row].first] ?? 0;
  const rows = layers.map(({ layer }) => layerName(layer));
  tables.changes = () => ({
    columns: ["layer", ...powers],
    rows: rows.map((layer, row) => [layer, ...powers.map((_, place) => count(row, place))]),
  });
  return counts(rows, powers, count, "elements by the power of two of their change", (row, place, cell) => [
    `layer ${rows[row]}`,
    `${number(cell[2])} elements changed by ${powers[place]} or more, and by less than its double`,
  ]);
}

const MEASURES = {
  norms: "norm of weights", updates: "RMS of Adam's update", moments: "RMS of exp_avg",
  seconds: "root of the mean of exp_avg_sq",
};
let steps; // short names of the checkpoints of a run

function overTime({ run: key }) {
  const { rows, checkpoints } = report.run;
  const title = MEASURES[key];
  const value = (point, row) => point[key]?.[row] ?? null;
  tables.run = () => ({
    columns: ["layer", ...checkpoints.map(({ name: checkpoint, step }) => `${checkpoint}, step ${step}`)],
    rows: rows.map((row) => [layerName(row), ...checkpoints.map((point) => value(point, row))]),
  });
  const cells = checkpoints.flatMap((point, column) =>
    rows.map((row, place) => [place, column, value(point, row), null]));
  const names = checkpoints.map(({ whole, faults }, place) => `${whole && !faults ? "" : "✕ "}${steps[place]}`);
  return heat(rows.map(layerName), names, cells, title, {
    says(row, column, cell) {
      const { name: checkpoint, why } = checkpoints[column];
      return [`${checkpoint}, layer ${layerName(rows[row])}`, `${title}: ${short(cell[2])}`,
        ...(why ? [`✕ ${why}`] : [])];
    },
  });
}

tables.faults = () => ({
  columns: ["kind", "what is wrong", "file", "byte", "bytes"],
  rows: report.faults.map(({ kind, message, file, offset, length }) =>
    [kind, message, file ?? null, offset ?? null, length ?? null]),
});

/** Shows what a fault is about: its tensor among the numbers, or its file on the map. */
function lead({ tensor, file }, section) {
  if (section === "map" && grids.map) {
    const row = report.map.files.findIndex((each) => each.name === file);
    if (row >= 0) grids.map.point([row, 0], true);
  } else if (section === "numbers" && grids.numbers) {
    const place = report.tensors.name.indexOf(tensor);
    const has = ({ cells }) => cells.find((cell) => cell[3] === place);
    const measure = place < 0 ? undefined : report.numbers.measures.find(has);
    if (!measure) return;
    const button = all("input[name=numbers]").find(({ value }) => value === measure.key);
    button.checked = true;
    button.dispatchEvent(new Event("change", { bubbles: true }));
    const cell = has(measure).slice(0, 2);
    grids.numbers.point(cell, true);
    grids.numbers.enter(cell);
  }
}

/* ---- start */

const VIEWS = { run: overTime, numbers, map: () => owners(), masters, changes };

async function start() {
  const source = one("#document");
  ({ signs: kinds, palette: PALETTE, steps } = JSON.parse(source.dataset.settings));
  const bytes = Uint8Array.from(atob(source.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  report = await new Response(stream).json();
  const tensor = new Map((report.tensors?.name ?? []).map((text, place) => [text, place]));
  for (const fault of report.faults ?? []) {
    const place = tensor.get(fault.tensor);
    if (place === undefined) continue;
    if (!signs.has(place)) signs.set(place, fault.kind);
    const line = `${kinds[fault.kind] ?? "!"} ${fault.kind}: ${fault.message}`;
    wrong.set(place, [...(wrong.get(place) ?? []), line]);
  }
  for (const figure of all("[data-figure]")) {
    const key = figure.dataset.figure;
    const pressed = () => all("input:checked", figure).map(({ name, value }) => [name, value]);
    const chosen = () => VIEWS[key](Object.fromEntries(pressed()));
    grids[key] = new Grid(figure);
    grids[key].show(chosen());
    figure.addEventListener("change", () => {
      grids[key].show(chosen());
      setTimeout(() => refresh(key)); // the figure answers first
    });
  }
  const own = (report.faults ?? []).filter(({ checkpoint }) => !(report.run && checkpoint));
  for (const link of all("a[data-fault]")) {
    link.addEventListener("click", () => lead(own[link.dataset.fault], link.hash.slice(1)));
  }
  for (const details of all("details[data-table]")) {
    details.addEventListener("toggle", () => refresh(details.dataset.table));
  }
  const redraw = () => Grid.drawn.forEach((grid) => grid.draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let opened = [];
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("light");
    opened = all("details:not([open])");
    for (const details of opened) {
      details.open = true;
      refresh(details.dataset.table);
    }
    redraw();
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("light");
    for (const details of opened) details.open = false;
    redraw();
  });
  document.documentElement.dataset.ready = "";
}

if ("DecompressionStream" in window) start();
else one("#unable").hidden = false;

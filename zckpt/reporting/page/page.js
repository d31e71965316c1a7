/* What do the figures of this page show? The views of `Grid`, the tables, and the start. */

let report;       // the document
let kinds = {};   // the sign of each kind of fault
const signs = new Map(); // tensor -> the kind of its worst fault
const wrong = new Map(); // tensor -> sentences
const grids = {}, tables = {};

const field = (key, tensor) => report.tensors?.[key]?.[tensor];
const dash = (value) => (value === null || value === undefined ? null : value);

/* ---- numbers */

const FIELDS = ["name", "dtype", "shape", "bytes", "min", "max", "mean", "std", "nan", "inf", "zero", "denormal"];

function numbers({ numbers: key, apart: relative }) {
  const { rows, columns, measures } = report.numbers;
  const measure = measures.find((one) => one.key === key) ?? measures[0];
  const title = measure.unit ? `${measure.title} (${measure.unit})` : measure.title;
  const value = (cell) => (cell[2] === null ? "no finite value" : short(cell[2]));
  tables.numbers = () => {
    const known = FIELDS.map((key) => report.tensors?.[key]).filter(Boolean);
    return {
      columns: ["layer", "kind", title, ...FIELDS.filter((key) => report.tensors?.[key])],
      rows: measure.cells.map(([row, column, size, tensor]) =>
        [rows[row], columns[column], size, ...known.map((values) => dash(values[tensor]))]),
      bad: (place) => signs.has(measure.cells[place][3]),
    };
  };
  return heat(rows, columns, measure.cells, relative ? `${title}: times from the column's median` : title, {
    signs, kinds, ...(relative && { by: apart(measure.cells) }),
    says: (row, column, cell) => (cell
      ? [field("name", cell[3]) ?? `${rows[row]} ${columns[column]}`, `${measure.title}: ${value(cell)}`,
        cell[3] === null ? "" : `${field("dtype", cell[3])}, ${short(field("shape", cell[3]))}, ${sized(field("bytes", cell[3]))}`,
        ...(wrong.get(cell[3]) ?? [])].filter(Boolean)
      : [`${rows[row]} ${columns[column]}`, "no such tensor"]),
    enter(cell) {
      const known = cell ? FIELDS.filter((key) => dash(field(key, cell[3])) !== null) : [];
      const rows = known.map((key) => make("div", {}, make("dt", {}, key),
        make("dd", {}, name(key === "bytes" ? sized(field(key, cell[3])) : short(field(key, cell[3]))))));
      one(".detail").replaceChildren(make("dl", {}, ...rows),
        ...(wrong.get(cell?.[3]) ?? []).map((text) => make("p", { class: "bad" }, name(text))));
    },
  });
}

/* ---- who has what */

const SLOTS = ["param", "master", "exp_avg", "exp_avg_sq"]; // have the same colors on every page

/** A map's view of the whole model, of one layer (`group`), or of one parameter. */
function owners({ group = null, parameter = null } = {}) {
  const { files, groups, of_tensor: of, pieces, damaged = [] } = report.map;
  const { slot: slots = [], shape = [], parameter: names = [] } = report.tensors ?? {};
  const lanes = [...new Set([...SLOTS, ...pieces.slot])].filter((slot) => pieces.slot.includes(slot));
  const lost = (file) => file.state === "missing";
  const totals = {}, before = [];
  of.forEach((owner, tensor) => { // where each tensor begins among those of its layer and slot
    const key = `${owner} ${slots[tensor]}`;
    before[tensor] = totals[key] ?? 0;
    totals[key] = before[tensor] + product(shape[tensor]);
  });
  const inside = group === null ? [] : of.flatMap((owner, tensor) => (owner === group ? names[tensor] : []));
  const columns = parameter !== null ? [parameter] : group !== null ? [...new Set(inside)] : groups;
  const column = new Map(columns.map((text, place) => [text, place]));
  const tensorOf = (piece) => pieces.tensor?.[piece] ?? null;
  const bars = [], cells = new Map();
  pieces.file.forEach((file, piece) => {
    const tensor = tensorOf(piece);
    const at = group === null ? pieces.group[piece] : pieces.group[piece] === group ? column.get(names[tensor]) : undefined;
    if (at === undefined) return;
    const whole = group === null ? totals[`${at} ${pieces.slot[piece]}`] : product(shape[tensor]);
    const shift = group === null && tensor !== null ? before[tensor] : 0;
    bars.push({ piece, file, at, lane: lanes.indexOf(pieces.slot[piece]),
      from: (shift + pieces.start[piece]) / whole, to: (shift + pieces.stop[piece]) / whole });
    const key = file * columns.length + at;
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(piece);
  });
  const marks = damaged.flatMap((hurt) => { // the bars that have a damaged byte
    const hit = bars.filter(({ piece, file }) => file === hurt.file && (hurt.tensor === null || hurt.tensor === undefined
      || tensorOf(piece) === null || tensorOf(piece) === hurt.tensor) && (pieces.tensor === null
      ? pieces.group[piece] === of[hurt.tensor] && pieces.slot[piece] === slots[hurt.tensor]
      : pieces.offset[piece] < hurt.offset + hurt.length && hurt.offset < pieces.offset[piece] + pieces.length[piece]));
    return hit.slice(0, 1).map((bar) => { // the middle of its damaged bytes
      const [start, size] = [pieces.offset[bar.piece], pieces.length[bar.piece]];
      const ends = [hurt.offset, hurt.offset + hurt.length].map((byte) => clamp((byte - start) / size, 0, 1));
      return { ...bar, hurt, along: (ends[0] + ends[1]) / 2 };
    });
  });
  tables.map = () => ({
    columns: ["file", "layer", "parameter", "slot", "first element", "behind the last", "at byte", "bytes", "state"],
    rows: [...files.filter((file) => lost(file)).map((file) => [file.name, null, null, null, null, null, null, null, "missing"]),
      ...bars.map(({ piece, file }) => [files[file].name, groups[pieces.group[piece]], tensorOf(piece) === null ? null : names[tensorOf(piece)],
        pieces.slot[piece], pieces.start[piece], pieces.stop[piece], pieces.tensor ? pieces.offset[piece] : null, pieces.length[piece],
        lost(files[file]) ? "missing" : marks.some((mark) => mark.piece === piece) ? "damaged" : "ok"])],
    bad: (place, row) => row[8] !== "ok",
  });
  const go = (level) => {
    grids.map.show(owners(level));
    one(".crumbs").replaceChildren(...crumbs(level));
    tables.refresh("map");
  };
  const crumbs = (level) => {
    const steps = [["whole model", {}]];
    if (level.group !== undefined) steps.push([groups[level.group], { group: level.group }]);
    if (level.parameter !== undefined) steps.push([level.parameter, level]);
    const last = steps.pop();
    return [...steps.map(([text, to]) => make("button", { type: "button", click: () => { go(to); grids.map.canvas.focus(); } }, name(text))),
      make("span", { "aria-current": "true" }, name(last[0]))];
  };
  if (group === null) one(".crumbs").replaceChildren(...crumbs({}));
  return {
    rows: labels(files), columns: parameter === null ? without(columns, ".") : columns, least: 8, widest: 2000, height: 680, tallest: 34,
    paint(context, box) {
      const colors = lanes.map((_, lane) => css(`slot-${lane % 6}`)), lines = hatch(context, css("fault"));
      const holes = new Set(bars.map(({ file }) => file)); // of a lost file too, if others tell what it had
      files.forEach((file, row) => columns.forEach((_, at) => {
        const [x, y, wide, tall] = box(row, at);
        context.fillStyle = lost(file) && !holes.has(row) ? lines : css("hollow");
        context.fillRect(x, y, wide - (wide > 5), tall - (tall > 4));
      }));
      for (const { file, at, lane, from, to } of bars) {
        const [x, y, wide, tall] = box(file, at);
        const full = wide - (wide > 5), each = (tall - (tall > 4)) / lanes.length;
        context.fillStyle = lost(files[file]) ? lines : colors[lane];
        context.fillRect(x + full * from, y + each * lane, Math.max(full * (to - from), 0.6), Math.max(each - (each > 3 ? 0.5 : 0), 0.5));
      }
      for (const { file, at, from, to, lane, along } of marks) {
        const [x, y, wide, tall] = box(file, at);
        sign(context, "✕", x + wide * (from + (to - from) * along), y + (tall / lanes.length) * (lane + 0.5), 14);
      }
      files.forEach((file, row) => {
        if (!lost(file)) return;
        const [x, y, wide, tall] = box(row, 0);
        if (tall > 9) sign(context, "missing", x + (wide * columns.length) / 2, y + tall / 2, 12);
      });
    },
    legend: () => [...lanes.map((slot, lane) => make("span", {}, make("i", { class: `slot slot-${lane % 6}` }), name(` ${lane + 1} ${slot}`))),
      make("span", { class: "quiet" }, pieces.tensor ? "lanes of a row from top to bottom" : "lanes from top to bottom; a bar's length is the share"),
      ...(files.some(lost) ? [make("span", {}, make("b", { class: "sign" }, "▨"), " missing file")] : []),
      ...(damaged.length ? [make("span", {}, make("b", { class: "sign" }, "✕"), " damaged bytes")] : [])],
    says(row, at) {
      const file = files[row], own = cells.get(row * columns.length + at) ?? [];
      if (lost(file) && !own.length) return [file.name, columns[at], "this file is missing"];
      const lines = lanes.flatMap((slot) => {
        const some = own.filter((piece) => pieces.slot[piece] === slot);
        if (!some.length) return [];
        const elements = some.reduce((sum, piece) => sum + pieces.stop[piece] - pieces.start[piece], 0);
        const bytes = some.reduce((sum, piece) => sum + pieces.length[piece], 0);
        const one = some.length === 1 && pieces.tensor ? some[0] : null;
        return one === null ? `${slot}: ${number(elements)} elements${some.length > 1 ? ` in ${some.length} pieces` : ""}, ${sized(bytes)}`
          : `${slot}: elements ${number(pieces.start[one])} to ${number(pieces.stop[one])}, ${sized(bytes)} at byte ${number(pieces.offset[one])}`;
      });
      const hurt = marks.filter((mark) => mark.file === row && mark.at === at).map((mark) =>
        `✕ damaged: ${number(mark.hurt.length)} bytes at byte ${number(mark.hurt.offset)}`);
      return [file.name, columns[at], ...(lost(file) ? ["this file is missing; it had"] : []), ...(lines.length ? lines : ["has nothing of it"]), ...hurt];
    },
    enter(row, at) {
      if (pieces.tensor && group === null) go({ group: at });
      else if (pieces.tensor && parameter === null) go({ group, parameter: columns[at] });
    },
    back: () => (parameter !== null ? go({ group }) : group !== null && go({})),
  };
}

/** Names without the parts that all of them begin with. */
function without(names, separator) {
  const parts = names.map((text) => text.split(separator));
  let same = 0;
  while (names.length > 1 && parts.every((some) => some.length > same + 1 && some[same] === parts[0][same])) same += 1;
  return parts.map((some) => some.slice(same).join(separator));
}

/** Files by their ranks, of axes that have several, and by their paths. */
function labels(files) {
  const axes = [...new Set(files.flatMap((file) => Object.keys(file.rank ?? {})))]
    .filter((axis) => new Set(files.flatMap((file) => file.rank?.[axis] ?? [])).size > 1);
  const paths = without(files.map((file) => file.name), "/");
  return files.map(({ rank, state }, place) => [{ missing: "▨", damaged: "✕" }[state],
    ...axes.filter((axis) => rank?.[axis] !== undefined).map((axis) => `${axis} ${rank[axis]}`), paths[place]].filter(Boolean).join("  "));
}

/* ---- masters, changes, and a run */

function masters() {
  const { rows, bins } = report.masters;
  const cells = rows.flatMap((row, place) => row.counts.map((count, bin) => [place, bin, count, null]));
  return heat(rows.map((row) => (row.worst ? `≠ ${row.layer}` : row.layer)), bins, cells, "elements per distance in ULP", {
    zero: "", height: 380,
    says: (row, bin, cell) => [`layer ${rows[row].layer}`, `${number(cell[2])} elements are ${bins[bin]} ULP away`,
      ...(rows[row].worst ? [`farthest: ${short(rows[row].worst)} ULP in ${field("name", rows[row].tensor) ?? "?"}`] : [])],
  });
}

function changes() {
  const { layers, histograms } = report.against;
  const known = histograms.filter(Boolean);
  const first = Math.min(...known.map((each) => each.first));
  const size = Math.max(...known.map((each) => each.first + each.counts.length)) - first;
  const powers = Array.from({ length: size }, (_, place) => `2${superscript(first + place)}`);
  const count = (row, place) => histograms[row]?.counts[first + place - histograms[row].first] ?? 0;
  const rows = layers.map(({ layer }) => layer);
  tables.changes = () => ({ columns: ["layer", ...powers], rows: rows.map((layer, row) => [layer, ...powers.map((_, place) => count(row, place))]) });
  return heat(rows, powers, rows.flatMap((_, row) => powers.map((_, place) => [row, place, count(row, place), null])), "elements by the power of two of their change", {
    zero: "", height: 480,
    says: (row, place, cell) => [`layer ${rows[row]}`, `${number(cell[2])} elements changed by ${powers[place]} or more, and by less than its double`],
  });
}

function overTime({ run: key }) {
  const { rows, checkpoints } = report.run;
  const cells = checkpoints.flatMap((point, column) => rows.map((row, place) => [place, column, dash(point[key]?.[row]) , null]));
  const title = key === "norms" ? "norm of weights" : "RMS of Adam's update";
  tables.run = () => ({
    columns: ["layer", ...checkpoints.map((point) => `step ${point.step}`)],
    rows: rows.map((row) => [row, ...checkpoints.map((point) => dash(point[key]?.[row]))]),
  });
  return heat(rows, checkpoints.map((point) => (point.whole ? "" : "✕ ") + point.step), cells, title, {
    says: (row, column, cell) => [`${checkpoints[column].name}, layer ${rows[row]}`, `${title}: ${short(cell[2])}`,
      ...(checkpoints[column].whole ? [] : [`✕ not whole: ${checkpoints[column].why ?? ""}`])],
  });
}

/* ---- tables */

/** Fills a table that is open: rows that contain a text, sorted by a column, a page at a time. */
tables.refresh = (key) => {
  const details = one(`details[data-table="${key}"]`);
  details?.querySelectorAll(".filled").forEach((old) => old.remove());
  if (!details?.open || !tables[key]) return;
  const { columns, rows, bad = () => false } = tables[key]();
  const numeric = columns.map((_, place) => rows.some((row) => typeof row[place] === "number"));
  const order = rows.map((row, place) => place);
  let kept = order, page = 0, sorted = -1, up = true;
  const head = make("tr", {}, ...columns.map((title, place) => make("th", { scope: "col", class: numeric[place] ? "n" : "" },
    make("button", { type: "button", click: () => sort(place) }, name(title)))));
  const body = make("tbody"), state = make("span", { role: "status" });
  const seek = make("input", { type: "search", input: () => filter() });
  const turn = (by) => make("button", { type: "button", click: () => { page += by; fill(); } }, by < 0 ? "‹ back" : "next ›");
  const [back, next] = [turn(-1), turn(1)];
  function fill() {
    const last = Math.max(Math.ceil(kept.length / PAGE) - 1, 0);
    page = clamp(page, 0, last);
    body.replaceChildren(...kept.slice(page * PAGE, (page + 1) * PAGE).map((place) =>
      make("tr", { class: bad(place, rows[place]) ? "bad" : "" }, ...rows[place].map((value, column) =>
        make("td", { class: numeric[column] ? "n" : "" }, numeric[column] ? short(value) : name(short(value)))))));
    state.textContent = `${number(kept.length)} rows${last ? `, page ${page + 1} of ${last + 1}` : ""}`;
    back.disabled = page === 0;
    next.disabled = page === last;
    back.hidden = next.hidden = !last;
  }
  function filter() {
    const text = seek.value.toLowerCase();
    kept = text === "" ? order : order.filter((place) => rows[place].some((value) => typeof value === "string" && value.toLowerCase().includes(text)));
    page = 0;
    fill();
  }
  function sort(place) {
    up = sorted === place ? !up : !numeric[place]; // the largest numbers first
    sorted = place;
    const compare = numeric[place] ? (a, b) => (a ?? -Infinity) - (b ?? -Infinity) : (a, b) => (String(a) < String(b) ? -1 : String(a) > String(b) ? 1 : 0);
    order.sort((a, b) => (up ? 1 : -1) * compare(rows[a][place], rows[b][place]));
    [...head.children].forEach((cell, i) => (i === place ? cell.setAttribute("aria-sort", up ? "ascending" : "descending") : cell.removeAttribute("aria-sort")));
    filter();
  }
  filter();
  details.append(make("div", { class: "filled" }, make("p", { class: "tools" }, make("label", {}, "Rows with ", seek), state, back, next),
    make("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "Rows of the table" },
      make("table", {}, make("thead", {}, head), body))));
};

tables.faults = () => ({
  columns: ["kind", "what is wrong", "file", "byte", "bytes"],
  rows: report.faults.map((fault) => [fault.kind, fault.message, dash(fault.file), dash(fault.offset), dash(fault.length)]),
});

/* ---- start */

const VIEWS = { run: overTime, numbers, map: () => owners(), masters, changes };

async function start() {
  const source = one("#document");
  ({ signs: kinds, palette: PALETTE } = JSON.parse(source.dataset.settings));
  const bytes = Uint8Array.from(atob(source.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  report = await new Response(stream).json();
  const tensor = new Map((report.tensors?.name ?? []).map((text, place) => [text, place]));
  for (const fault of report.faults ?? []) {
    const place = tensor.get(fault.tensor);
    if (place === undefined) continue;
    if (!signs.has(place)) signs.set(place, fault.kind);
    wrong.set(place, [...(wrong.get(place) ?? []), `${kinds[fault.kind] ?? "!"} ${fault.kind}: ${fault.message}`]);
  }
  for (const figure of all("[data-figure]")) {
    const key = figure.dataset.figure;
    const chosen = () => VIEWS[key](Object.fromEntries(all("input:checked", figure).map(({ name, value }) => [name, value])));
    grids[key] = new Grid(figure);
    grids[key].show(chosen());
    figure.addEventListener("change", () => {
      grids[key].show(chosen());
      tables.refresh(key);
    });
  }
  for (const details of all("details[data-table]")) {
    details.addEventListener("toggle", () => tables.refresh(details.dataset.table));
  }
  const redraw = () => Grid.drawn.forEach((grid) => grid.draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let opened = [];
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("light");
    opened = all("details:not([open])");
    for (const details of opened) {
      details.open = true;
      tables.refresh(details.dataset.table);
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

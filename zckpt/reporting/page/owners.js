/* Who has what? A map of files by layers, by the parameters of a layer, or by the elements of one
parameter. A bar is what a file has of a column; each slot has a lane of its own. */

const SLOTS = ["param", "master", "exp_avg", "exp_avg_sq"]; // have the same colors on every page
const lost = (file) => file.state === "missing";

/** Where the pieces of files lie in the columns of a level: `{group, parameter}`, or less. */
function placed({ group, parameter }) {
  const { files, of_tensor: owner, pieces } = report.map;
  const groups = report.map.groups.map(layerName);
  const { slot: slots = [], shape: shapes = [], parameter: names = [] } = report.tensors ?? {};
  const used = new Set(pieces.slot);
  const lanes = [...new Set([...SLOTS, ...used])].filter((slot) => used.has(slot));
  const totals = {}, before = []; // elements of a layer's slot, and of it before each tensor
  owner.forEach((layer, tensor) => {
    const key = `${layer} ${slots[tensor]}`;
    before[tensor] = totals[key] ?? 0;
    totals[key] = before[tensor] + product(shapes[tensor]);
  });
  const whole = group === undefined;
  const own = names.filter((_, tensor) => owner[tensor] === group);
  const columns = whole ? groups : parameter === undefined ? [...new Set(own)] : [parameter];
  const column = new Map(columns.map((text, at) => [text, at]));
  const bars = [];
  pieces.file.forEach((file, piece) => {
    const tensor = pieces.tensor ? pieces.tensor[piece] : null; // null: sums of very many pieces
    const layer = pieces.group[piece], slot = pieces.slot[piece];
    const at = whole ? layer : layer === group ? column.get(names[tensor]) : undefined;
    if (at === undefined) return;
    const elements = whole ? totals[`${layer} ${slot}`] : product(shapes[tensor]);
    const shift = whole && tensor !== null ? before[tensor] : 0;
    const [start, stop] = [pieces.start[piece], pieces.stop[piece]];
    bars.push({
      file: files[file], row: file, at, tensor, layer, slot, start, stop,
      lane: lanes.indexOf(slot), offset: pieces.offset[piece], bytes: pieces.length[piece],
      from: (shift + start) / elements, to: (shift + stop) / elements,
    });
  });
  return { columns, lanes, bars };
}

/** The bars that have damaged bytes; `along` is where in a bar these are. */
function damages(bars) {
  const { slot: slots = [] } = report.tensors ?? {};
  return (report.map.damaged ?? []).flatMap((hurt) => {
    const end = hurt.offset + hurt.length;
    const hit = bars.find((bar) => bar.row === hurt.file && (bar.tensor === null
      ? bar.layer === report.map.of_tensor[hurt.tensor] && bar.slot === slots[hurt.tensor]
      : bar.tensor === (hurt.tensor ?? bar.tensor) && bar.offset < end && hurt.offset < bar.offset + bar.bytes));
    if (!hit) return [];
    const [first, last] = [hurt.offset, end].map((byte) => clamp((byte - hit.offset) / hit.bytes, 0, 1));
    return [{ bar: hit, hurt, along: (first + last) / 2 }];
  });
}

/** The view of a level; Enter goes a level down, Escape a level up. */
function owners(level = {}) {
  const { files, pieces } = report.map;
  const groups = report.map.groups.map(layerName);
  const { columns, lanes, bars } = placed(level);
  const marks = damages(bars), damaged = new Set(marks.map(({ bar }) => bar));
  const cells = new Map();
  for (const bar of bars) {
    const key = bar.row * columns.length + bar.at;
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(bar);
  }
  const go = (to) => {
    grids.map.show(owners(to));
    refresh("map");
  };
  crumbs(level, go);
  tables.map = () => ({
    columns: ["file", "layer", "parameter", "slot", "first element", "behind the last", "at byte", "bytes", "state"],
    rows: [
      ...files.filter(lost).map((file) => [file.name, ...Array(7).fill(null), "missing"]),
      ...bars.map((bar) => [bar.file.name, groups[bar.layer], field("parameter", bar.tensor) ?? null,
        bar.slot, bar.start, bar.stop, bar.tensor === null ? null : bar.offset, bar.bytes,
        lost(bar.file) ? "missing" : damaged.has(bar) ? "damaged" : "ok"]),
    ],
    bad: (place, row) => row[8] !== "ok",
  });
  return {
    rows: labels(files), columns: columns.length > 1 ? without(columns, ".") : columns,
    least: 8, widest: 2000, height: 680, tallest: 34,
    paint: (context, box) => paintOwners(context, box, { files, columns, lanes, bars, marks }),
    legend: () => [
      ...lanes.map((slot, lane) =>
        make("span", {}, make("i", { class: `slot slot-${lane % 6}` }), name(` ${lane + 1} ${slot}`))),
      make("span", { class: "quiet" },
        `lanes from top to bottom${pieces.tensor ? "" : "; a bar's length is the share"}`),
      ...(files.some(lost) ? [signed("▨", "missing")] : []),
      ...(marks.length ? [signed("✕", "damaged bytes")] : []),
    ],
    says(row, at) {
      const own = cells.get(row * columns.length + at) ?? [];
      const lines = lanes.flatMap((slot) => saidOf(slot, own.filter((bar) => bar.slot === slot)));
      const hurt = marks.filter(({ bar }) => bar.row === row && bar.at === at).map(({ hurt: { offset, length } }) =>
        `✕ damaged: ${number(length)} bytes at byte ${number(offset)}`);
      const had = lost(files[row]) ? [`this file is missing${lines.length ? "; it had" : ""}`] : [];
      const nothing = lines.length || had.length ? [] : ["has nothing of it"];
      return [files[row].name, columns[at], ...had, ...lines, ...nothing, ...hurt];
    },
    enter(row, at) {
      if (!pieces.tensor || level.parameter !== undefined) return;
      go(level.group === undefined ? { group: at } : { ...level, parameter: columns[at] });
    },
    back() {
      if (level.parameter !== undefined) go({ group: level.group });
      else if (level.group !== undefined) go({});
    },
  };
}

/** A line about what a file has of a slot. */
function saidOf(slot, bars) {
  if (!bars.length) return [];
  const sum = (of) => bars.reduce((total, bar) => total + of(bar), 0);
  const bytes = sized(sum((bar) => bar.bytes));
  const [bar] = bars;
  if (bars.length === 1 && bar.tensor !== null) {
    return [`${slot}: elements ${number(bar.start)} to ${number(bar.stop)}, ${bytes} at byte ${number(bar.offset)}`];
  }
  const pieces = bars.length > 1 ? ` in ${bars.length} pieces` : "";
  return [`${slot}: ${number(sum(({ start, stop }) => stop - start))} elements${pieces}, ${bytes}`];
}

function paintOwners(context, box, { files, columns, lanes, bars, marks }) {
  const colors = lanes.map((_, lane) => css(`slot-${lane % 6}`)), holes = hatch(context, css("fault"));
  const known = new Set(bars.map(({ row }) => row)); // of a lost file too, if others tell what it had
  const gap = ([, , wide, tall]) => [wide - (wide > 5), tall - (tall > 4)];
  files.forEach((file, row) => columns.forEach((_, at) => {
    const cell = box(row, at);
    context.fillStyle = lost(file) && !known.has(row) ? holes : css("hollow");
    context.fillRect(cell[0], cell[1], ...gap(cell));
  }));
  for (const { file, row, at, lane, from, to } of bars) {
    const cell = box(row, at), [x, y] = cell, [wide, tall] = gap(cell), each = tall / lanes.length;
    context.fillStyle = lost(file) ? holes : colors[lane];
    context.fillRect(x + wide * from, y + each * lane, Math.max(wide * (to - from), 0.6),
      Math.max(each - (each > 3 ? 0.5 : 0), 0.5));
  }
  for (const { bar: { row, at, from, to, lane }, along } of marks) {
    const [x, y, wide, tall] = box(row, at);
    sign(context, "✕", x + wide * (from + (to - from) * along), y + (tall / lanes.length) * (lane + 0.5), 14);
  }
  files.forEach((file, row) => {
    const [x, y, wide, tall] = box(row, 0);
    if (lost(file) && tall > 9) sign(context, "missing", x + (wide * columns.length) / 2, y + tall / 2, 12);
  });
}

/** The way back: a button for each level above the one that is shown. */
function crumbs(level, go) {
  const steps = [["whole model", {}]];
  if (level.group !== undefined) steps.push([layerName(report.map.groups[level.group]), { group: level.group }]);
  if (level.parameter !== undefined) steps.push([level.parameter, level]);
  const [here] = steps.pop();
  const button = ([text, to]) => make("button", {
    type: "button",
    click() {
      go(to);
      grids.map.canvas.focus();
    },
  }, name(text));
  one(".crumbs").replaceChildren(...steps.map(button), make("span", { "aria-current": "true" }, name(here)));
}

/** Names without the parts that all of them begin with. */
function without(names, separator) {
  const parts = names.map((text) => text.split(separator));
  const shared = (place) => parts.every((some) => some.length > place + 1 && some[place] === parts[0][place]);
  let same = 0;
  while (names.length > 1 && shared(same)) same += 1;
  return parts.map((some) => some.slice(same).join(separator));
}

/** Files by their states, their ranks on axes that have several, and their paths. */
function labels(files) {
  const axes = [...new Set(files.flatMap(({ rank }) => Object.keys(rank ?? {})))];
  const several = axes.filter((axis) => new Set(files.flatMap(({ rank }) => rank?.[axis] ?? [])).size > 1);
  const paths = without(files.map((file) => file.name), "/");
  return files.map(({ rank, state }, place) => {
    const places = several.filter((axis) => rank?.[axis] !== undefined).map((axis) => `${axis} ${rank[axis]}`);
    return [{ missing: "▨", damaged: "✕" }[state], ...places, paths[place]].filter(Boolean).join("  ");
  });
}

/* How is a table filled? When it is opened: rows that contain a text, sorted by a column, a page at
a time. A table is `{columns, rows, bad}`: titles, lists of values, and which rows are faults. */

const PAGE = 100; // rows at once
const tables = {}; // what gives the table of a figure, by the figure's key

/** Fills the table of a figure anew, if it is open. */
function refresh(key) {
  const details = one(`details[data-table="${key}"]`);
  all(".filled", details ?? document.createElement("p")).forEach((old) => old.remove());
  if (details?.open && tables[key]) details.append(filled(tables[key]()));
}

function filled({ columns, rows, bad = () => false }) {
  const numeric = columns.map((_, place) => rows.some((row) => typeof row[place] === "number"));
  const kind = (place) => (numeric[place] ? "n" : "");
  const order = rows.map((row, place) => place);
  let kept = order, page = 0, sorted = -1, up = true;

  const title = (text, place) => make("th", { scope: "col", class: kind(place) },
    make("button", { type: "button", click: () => sort(place) }, name(text)));
  const head = make("tr", {}, ...columns.map(title));
  const body = make("tbody"), state = make("span", { role: "status" });
  const seek = make("input", { type: "search", input: () => filter() });
  const turn = (by, text) => make("button", { type: "button", click: () => fill(page + by) }, text);
  const [back, next] = [turn(-1, "‹ back"), turn(1, "next ›")];

  function fill(wanted) {
    const last = Math.max(Math.ceil(kept.length / PAGE) - 1, 0);
    page = clamp(wanted, 0, last);
    const cell = (value, place) => make("td", { class: kind(place) },
      numeric[place] ? short(value) : name(short(value)));
    body.replaceChildren(...kept.slice(page * PAGE, (page + 1) * PAGE).map((place) =>
      make("tr", { class: bad(place, rows[place]) ? "bad" : "" }, ...rows[place].map(cell))));
    state.textContent = `${number(kept.length)} rows${last ? `, page ${page + 1} of ${last + 1}` : ""}`;
    back.disabled = page === 0;
    next.disabled = page === last;
    back.hidden = next.hidden = !last;
  }
  function filter() {
    const text = seek.value.toLowerCase();
    const has = (value) => typeof value === "string" && value.toLowerCase().includes(text);
    kept = text === "" ? order : order.filter((place) => rows[place].some(has));
    fill(0);
  }
  function sort(place) {
    up = sorted === place ? !up : !numeric[place]; // the largest numbers first
    sorted = place;
    const value = numeric[place] ? (row) => row[place] ?? -Infinity : (row) => String(row[place]);
    const compare = (left, right) => (left < right ? -1 : left > right ? 1 : 0);
    order.sort((left, right) => (up ? 1 : -1) * compare(value(rows[left]), value(rows[right])));
    for (const cell of head.children) cell.removeAttribute("aria-sort");
    head.children[place].setAttribute("aria-sort", up ? "ascending" : "descending");
    filter();
  }

  filter();
  const table = make("table", {}, make("thead", {}, head), body);
  return make("div", { class: "filled" },
    make("p", { class: "tools" }, make("label", {}, "Rows with ", seek), state, back, next),
    make("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "Rows of the table" }, table));
}

"use strict";
document.documentElement.classList.add("scripted");

// Details are dialogs; the fragment of the address says which one is open, so that a link opens it again.
const named = () => document.getElementById(location.hash.slice(1));
const follow = () => {
  const wanted = named();
  for (const open of document.querySelectorAll("dialog[open]")) if (open !== wanted) open.close();
  if (!(wanted instanceof HTMLDialogElement) || wanted.open) return;
  const link = document.querySelector(`main a[href="#${CSS.escape(wanted.id)}"]`);
  if (link && !link.contains(document.activeElement)) {
    link.scrollIntoView({block: "center", inline: "center"});
    link.focus({preventScroll: true});
  }
  wanted.showModal();
  wanted.scrollTop = 0;
};
const forget = dialog => {
  if (named() === dialog) history.replaceState(null, "", location.pathname + location.search);
};
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("close", () => forget(dialog));
  dialog.addEventListener("click", event => {
    if (event.target === dialog || event.target.closest(".close")) { event.preventDefault(); dialog.close(); }
  });
}
addEventListener("hashchange", follow);
follow();

// Columns sort by a click on their heading; rows without a value come last, whichever way.
const key = (row, place) => {
  const cell = row.cells[place];
  if (!cell || !("order" in cell.dataset)) return cell && cell.colSpan === 1 ? cell.textContent.trim() : "";
  return cell.dataset.order === "" ? "" : Number(cell.dataset.order);
};
const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
const sort = heading => {
  const table = heading.closest("table");
  const descending = heading.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].map(row => [key(row, heading.cellIndex), row]);
  rows.sort(([a], [b]) => (a === "") - (b === "") || (a === "" ? 0 : (descending ? -1 : 1) * compare(a, b)));
  table.tBodies[0].append(...rows.map(([, row]) => row));
};
for (const heading of document.querySelectorAll("table.sortable thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...heading.childNodes);
  button.addEventListener("click", () => sort(heading));
  heading.append(button);
}

// Rows are filtered by the values of columns, by words, and by whether they decide a verdict.
for (const form of document.querySelectorAll("form.filters")) {
  const rows = [...document.getElementById(form.dataset.table).tBodies[0].rows];
  const heading = select => Number(select.dataset.column);
  const filter = () => {
    const chosen = [...form.querySelectorAll("select")].filter(select => select.value !== "");
    const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !chosen.every(select => row.cells[heading(select)].textContent.trim() === select.value)
        || !words.every(word => text.includes(word))
        || (form.elements.strongest.checked && !("strongest" in row.dataset));
      count += !row.hidden;
    }
    form.querySelector("output").textContent = `${count} of ${rows.length} rows`;
  };
  for (const event of ["input", "change"]) form.addEventListener(event, filter);
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));
  filter();
}

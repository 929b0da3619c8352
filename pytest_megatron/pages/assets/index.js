"use strict";
// Filters and sorts the table of an index. The page is whole without it.
(() => {
  const rows = [...document.querySelectorAll("#items tbody tr")], body = document.querySelector("#items tbody");
  const text = document.getElementById("filter"), count = document.getElementById("count");
  const boxes = [...document.querySelectorAll("input[data-verdict]")];
  if (!body) return;

  function filter() {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const on = new Set(boxes.filter((b) => b.checked).map((b) => b.dataset.verdict));
    let shown = 0;
    for (const row of rows) {
      const content = row.textContent.toLowerCase();
      row.hidden = !on.has(row.className) || !words.every((word) => content.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = shown === rows.length ? `${rows.length} items` : `${shown} of ${rows.length} items`;
  }

  function value(row, column) {
    const cell = row.cells[column], sort = cell.dataset.s;
    return sort === undefined ? cell.textContent : Number(sort);
  }

  function sort(header, column) {
    const isDown = header.getAttribute("aria-sort") === "ascending";
    for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    const sign = isDown ? -1 : 1;
    const keyed = rows.map((row, at) => [value(row, column), at, row]);
    keyed.sort(([a, i], [b, j]) => (a < b ? -sign : a > b ? sign : i - j));
    body.append(...keyed.map(([, , row]) => row));
  }

  text.addEventListener("input", filter);
  for (const box of boxes) box.addEventListener("change", filter);
  document.querySelectorAll("#items th button").forEach((button) => {
    const header = button.parentNode;
    button.addEventListener("click", () => sort(header, header.cellIndex));
  });
  filter();
})();

// Sorts tables of class "sortable" by a click on a heading; a second click reverses the order.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], original = [...body.rows];
  const key = (row, column) => {
    const cell = row.cells[column], text = (cell.dataset.sort ?? cell.textContent).trim();
    const number = parseFloat(text.replace(/[\u2212\u2013]/g, "-").replace(/(\d)[, ](?=\d{3})/g, "$1"));
    return { text, number };
  };
  const compare = (a, b, sign) => {
    const known = [Number.isFinite(a.number), Number.isFinite(b.number)];
    if (known[0] !== known[1]) return known[0] ? -1 : 1; // unknown values last
    return sign * (known[0] ? a.number - b.number : a.text.localeCompare(b.text));
  };
  const sort = (head, column) => {
    const order = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
    // Names begin with A, figures with the largest.
    const numbers = original.some((row) => Number.isFinite(key(row, column).number));
    const next = head.hasAttribute("aria-sort") || numbers ? order : "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", next);
    const rows = original.map((row) => [key(row, column), row]);
    rows.sort((a, b) => compare(a[0], b[0], next === "ascending" ? 1 : -1));
    body.append(...rows.map((one) => one[1]));
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(head, column));
    head.append(button);
  });
  table.classList.add("sorts");
}

// Sorts tables of class "sortable" by a click on a heading; a second click reverses the order. Without it pages lose nothing else.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], original = [...body.rows];
  const key = (row, column) => {
    const cell = row.cells[column], text = (cell.dataset.sort ?? cell.textContent).trim();
    const number = parseFloat(text.replace(/[\u2212\u2013]/g, "-").replace(/(\d)[, ](?=\d{3})/g, "$1"));
    return { text, number };
  };
  const compare = (a, b, sign) => {
    if (Number.isNaN(a.number) !== Number.isNaN(b.number)) return Number.isNaN(a.number) ? 1 : -1; // unknown values last
    return sign * (Number.isNaN(a.number) ? a.text.localeCompare(b.text) : a.number - b.number);
  };
  const sort = (head, column) => {
    const order = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
    const numbers = original.some((row) => !Number.isNaN(key(row, column).number));
    const next = head.hasAttribute("aria-sort") || numbers ? order : "ascending"; // names begin with A, figures with the largest
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

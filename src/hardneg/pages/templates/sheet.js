"use strict";
const source = document.getElementById("pairs"), pairs = JSON.parse(source.textContent);
const store = "hardneg-" + source.dataset.sheet, by = document.getElementById("by");
let answers = {}, at = 0;
try {
  const kept = JSON.parse(localStorage.getItem(store) || "{}");
  answers = kept.answers || {};
  by.value = kept.by || "";
} catch (error) { answers = {}; }
const keep = () => { try { localStorage.setItem(store, JSON.stringify({answers, by: by.value})); } catch (error) {} };
function fill(name, value) {
  const place = document.getElementById(name);
  place.textContent = value.text;
  if (value.image) {
    const image = document.createElement("img");
    image.src = value.image;
    image.alt = value.text;
    place.prepend(image);
  }
}
function show() {
  const pair = pairs[at], done = Object.keys(answers).length;
  document.getElementById("bar").value = done;
  document.getElementById("state").textContent = pairs.length
    ? `Pair ${at + 1} of ${pairs.length}; ${done} answered.` : "There is nothing to judge.";
  if (!pair) return;
  for (const name of ["query", "document", "positive"]) fill(name, pair[name]);
  document.getElementById("known").hidden = !pair.positive.text;
  for (const button of document.querySelectorAll("[data-grade]"))
    button.setAttribute("aria-pressed", String(answers[at] === button.dataset.grade));
}
function move(step) { at = Math.min(Math.max(at + step, 0), Math.max(pairs.length - 1, 0)); show(); }
function open() {
  for (let step = 1; step <= pairs.length; step++)
    if (!((at + step) % pairs.length in answers)) { at = (at + step) % pairs.length; break; }
  show();
}
function answer(grade) { if (pairs.length) { answers[at] = grade; keep(); at + 1 < pairs.length ? move(1) : show(); } }
const quoted = (text) => '"' + String(text).replaceAll('"', '""') + '"';
function table() {
  const rows = Object.keys(answers).map(Number).sort((a, b) => a - b)
    .map((i) => [...pairs[i].ids, answers[i], by.value || ""].map(quoted).join(","));
  return ["query-id,corpus-id,grade,by", ...rows].join("\r\n") + "\r\n";
}
function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([table()], {type: "text/csv;charset=utf-8"}));
  link.download = "answers-" + (by.value.replace(/[^\w-]+/g, "_") || "me") + "-" + source.dataset.sheet + ".csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
for (const button of document.querySelectorAll("[data-grade]"))
  button.addEventListener("click", () => answer(button.dataset.grade));
document.getElementById("back").addEventListener("click", () => move(-1));
document.getElementById("next").addEventListener("click", () => move(1));
document.getElementById("save").addEventListener("click", save);
by.addEventListener("input", keep);
document.addEventListener("keydown", (event) => {
  if (event.target === by || event.ctrlKey || event.metaKey || event.altKey) return;
  const grade = {y: "1", n: "0", "?": "?"}[event.key] || (/^[01]$/.test(event.key) ? event.key : null);
  if (grade !== null) answer(grade);
  else if (event.key === "ArrowLeft") move(-1);
  else if (event.key === "ArrowRight") move(1);
  else if (event.key === "u") open();
  else return;
  event.preventDefault();
});
show();

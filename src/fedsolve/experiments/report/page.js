"use strict";

// The reader's choice of light or dark; without one the system's holds.
const root = document.documentElement;
const themeButton = document.querySelector(".theme");
const systemDark = window.matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches;
}

function nameTheme() {
  themeButton.textContent = isDark() ? "Light page" : "Dark page";
  themeButton.setAttribute("aria-pressed", String(isDark()));
}

function remembered(value) {
  // Pages opened from a file may be denied storage; the choice then lasts as long as the page.
  try {
    if (value !== undefined) localStorage.setItem("fedsolve-theme", value);
    return localStorage.getItem("fedsolve-theme");
  } catch {
    return null;
  }
}

const choice = remembered();
if (choice === "light" || choice === "dark") root.dataset.theme = choice;
nameTheme();
themeButton.hidden = false;
systemDark.addEventListener("change", nameTheme);
themeButton.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  remembered(root.dataset.theme);
  nameTheme();
});

// Sorting: by data-value where a cell has one, as numbers if they are; empty cells stay last.
function valueOf(row, column) {
  const cell = row.cells[column];
  const text = cell.dataset.value ?? cell.textContent.trim();
  if (text === "") return null;
  const number = Number(text);
  return Number.isNaN(number) ? text : number;
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortBy(table, column) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const head = heads[column];
  // Of numbers a reader wants the highest first.
  const first = head.classList.contains("number") ? "descending" : "ascending";
  const other = first === "ascending" ? "descending" : "ascending";
  const order = head.getAttribute("aria-sort") === first ? other : first;
  for (const each of heads) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
  rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b)));
  body.append(...rows.map(([, row]) => row));
}

for (const table of document.querySelectorAll("table.results")) {
  const heads = table.tHead.rows[table.tHead.rows.length - 1].cells;
  [...heads].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort by this column";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sortBy(table, column));
  });
}

// The contents show where the reader is.
const links = new Map(
  [...document.querySelectorAll(".contents a")].map((link) => [link.getAttribute("href").slice(1), link]),
);
const seen = new Set();
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) seen.add(entry.target.id);
      else seen.delete(entry.target.id);
    }
    const current = [...links.keys()].find((id) => seen.has(id));
    for (const [id, link] of links) {
      if (id === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  },
  { rootMargin: "-10% 0px -60% 0px" },
);
for (const id of links.keys()) {
  const section = document.getElementById(id);
  if (section) watcher.observe(section);
}

// On paper nothing can be unfolded.
let unfolded = [];
window.addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const each of unfolded) each.open = true;
});
window.addEventListener("afterprint", () => {
  for (const each of unfolded) each.open = false;
});

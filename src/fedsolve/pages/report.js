"use strict";

// The reader's choice of light or dark; without one the system's holds.
const root = document.documentElement;
const theme = document.querySelector(".theme");
const system = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

function nameTheme() {
  theme.textContent = isDark() ? "Light page" : "Dark page";
  theme.setAttribute("aria-pressed", String(isDark()));
}

function remembered(value) {
  // Pages opened from a file may be denied storage; the choice then lasts as long as the page.
  try {
    if (value) localStorage.setItem("fedsolve-theme", value);
    return localStorage.getItem("fedsolve-theme");
  } catch {
    return null;
  }
}

if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
nameTheme();
theme.hidden = false;
system.addEventListener("change", nameTheme);
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  remembered(root.dataset.theme);
  nameTheme();
});

// Sorting: by data-value where a cell has one, as numbers if they are; empty cells stay last.
function sortBy(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  // The highest number comes first.
  const orders = ["descending", "ascending"];
  if (!heads[column].classList.contains("number")) orders.reverse();
  const order = heads[column].getAttribute("aria-sort") === orders[0] ? orders[1] : orders[0];
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const text = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const difference = Number(a) - Number(b);
    return sign * (Number.isNaN(difference) ? a.localeCompare(b, "en", { numeric: true }) : difference);
  };
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => compare(text(a), text(b))));
}

for (const table of document.querySelectorAll("table.results")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort by this column";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sortBy(table, column));
  });
}

// The contents show where the reader is.
const links = [...document.querySelectorAll(".contents a")];
const seen = new Set();
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) seen[entry.isIntersecting ? "add" : "delete"](`#${entry.target.id}`);
    const current = links.find((link) => seen.has(link.getAttribute("href")));
    for (const link of links) link.toggleAttribute("aria-current", link === current);
  },
  { rootMargin: "-10% 0px -60% 0px" },
);
for (const section of document.querySelectorAll("section.experiment")) watcher.observe(section);

// On paper nothing can be unfolded.
let unfolded = [];
window.addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const each of unfolded) each.open = true;
});
window.addEventListener("afterprint", () => {
  for (const each of unfolded) each.open = false;
});

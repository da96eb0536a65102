"use strict";
// Loads the page again every two seconds and replaces its contents.
const silence = document.getElementById("silence");
let answered = Date.now();

async function refresh() {
  if (document.hidden) return;
  try {
    const answer = await fetch("/", { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const main = document.querySelector("main");
    const shown = main.querySelector(".scroll")?.scrollLeft ?? 0;
    main.innerHTML = page.querySelector("main").innerHTML;
    const scroll = main.querySelector(".scroll");
    if (scroll) scroll.scrollLeft = shown;
    document.title = page.title;
    answered = Date.now();
    silence.hidden = true;
  } catch {
    const since = new Date(answered).toLocaleTimeString();
    silence.textContent = `No answer since ${since}: the process has ended or is busy. This page shows the state at that time.`;
    silence.hidden = false;
  }
}

setInterval(refresh, 2000);
document.addEventListener("visibilitychange", refresh);

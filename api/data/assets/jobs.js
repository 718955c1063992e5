// The list: looked at again while something in it runs, and exactly two to compare.

import { refresh } from "./portal.js";

const POLL_MS = 4000;
const list = document.getElementById("jobs");

function picked() {
  return [...list.querySelectorAll('input[name="job"]:checked')];
}

function count() {
  const button = document.getElementById("compare");
  if (!button) return;
  const ready = picked().length === 2;
  button.setAttribute("aria-disabled", String(!ready));
  button.textContent = ready ? "Compare these two" : "Choose two to compare";
}

list.addEventListener("change", count);
list.addEventListener("submit", (event) => {
  if (picked().length !== 2) event.preventDefault();
});
count();

setInterval(async () => {
  if (document.hidden || !("unfinished" in list.dataset) || picked().length) return;
  const fresh = await refresh().catch(() => null);
  if (fresh && !fresh.querySelector("[data-unfinished]")) delete list.dataset.unfinished;
  count();
}, POLL_MS);

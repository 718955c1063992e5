// A job's card in a frame. The token is in the fragment, and goes out in a header alone.

const main = document.querySelector("main");
const job = main.dataset.job;
const origins = JSON.parse(main.dataset.origins);
const POLL_MS = 4000;
const token = new URLSearchParams(location.hash.slice(1)).get("vt") ?? new URLSearchParams(location.search).get("vt");

// Who frames us, if it is one of those that may: nobody else hears of our height.
function parentOrigin() {
  const named = location.ancestorOrigins?.[0] ?? (document.referrer ? new URL(document.referrer).origin : "");
  return origins.includes(named) ? named : null;
}

let told = 0;
function height() {
  const parent = parentOrigin();
  const now = document.documentElement.offsetHeight;
  if (!parent || window.parent === window || now === told) return;
  told = now;
  window.parent.postMessage({ type: "precision:height", job, height: now }, parent);
}

function say(words) {
  const p = document.createElement("p");
  p.className = "empty small";
  p.textContent = words;
  main.replaceChildren(p);
  height();
}

async function look() {
  let answer;
  try {
    answer = await fetch(`/embed/jobs/${job}/card`, { headers: { Authorization: `Bearer ${token}` }, credentials: "omit" });
  } catch {
    return true; // the network may come back
  }
  if (answer.status === 401) say("This view has expired. Reload the page that it is part of.");
  else if (answer.status === 404) say("There is no such job any more.");
  if (!answer.ok) return answer.status >= 500 || answer.status === 429;
  const html = await answer.text();
  const fresh = new DOMParser().parseFromString(html, "text/html").body;
  if (fresh.innerHTML !== main.innerHTML) main.replaceChildren(...fresh.childNodes);
  height();
  return answer.headers.get("X-Job-State") === "live";
}

async function watch() {
  if (document.hidden || (await look())) setTimeout(watch, POLL_MS);
}

new ResizeObserver(height).observe(document.documentElement);
if (token && main.dataset.state !== "final" && main.dataset.state !== "over") watch();

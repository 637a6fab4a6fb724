// Asks for the page anew while it is looked at, and replaces the sections that are marked as live where they changed.
"use strict";

const EVERY_MS = 2000;
const SELDOM_MS = 30000;
const said = document.getElementById("live");
const pause = document.getElementById("pause");
let paused = false;
let wait = EVERY_MS;

function focused(within) {
  const key = within.contains(document.activeElement) && document.activeElement.dataset.key;
  return key || null;
}

function replace(old, fresh) {
  if (old.innerHTML === fresh.innerHTML) return;
  const key = focused(old);
  old.replaceChildren(...fresh.childNodes);
  if (key === null) return;
  const again = [...old.querySelectorAll("[data-key]")].find((one) => one.dataset.key === key);
  if (again) again.focus({ preventScroll: true });
}

async function look() {
  const answer = await fetch(location.href, { headers: { "X-Live": "1", Accept: "text/html" }, redirect: "manual" });
  if (answer.type === "opaqueredirect" || answer.status === 401) return location.reload();
  if (!answer.ok) throw new Error(answer.statusText);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const old of document.querySelectorAll("[data-live]")) {
    const found = fresh.getElementById(old.id);
    if (found) replace(old, found);
  }
}

async function turn() {
  if (!paused && !document.hidden) {
    try {
      await look();
      wait = EVERY_MS;
      said.textContent = `Live, ${new Date().toLocaleTimeString()}`;
    } catch {
      wait = Math.min(2 * wait, SELDOM_MS);
      said.textContent = "No answer; tried again";
    }
  }
  setTimeout(turn, wait);
}

if (document.querySelector("[data-live]")) {
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Go on" : "Pause";
    said.textContent = paused ? "Paused" : "Live";
  });
  setTimeout(turn, EVERY_MS);
}

// Keeps the page live while its tab is visible. Without this script every form and link works all the same.
"use strict";
(() => {
  const EVERY = 2000;
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

  function span(seconds) {
    for (let at = 0; at < units.length; at++) {
      const [unit, length] = units[at];
      if (seconds >= length) {
        const next = units[at + 1], rest = next && Math.floor((seconds % length) / next[1]);
        return Math.floor(seconds / length) + " " + unit + (rest ? ` ${rest} ${next[0]}` : "");
      }
    }
    return "0 s";
  }

  // By the clock of the schedule's server: the browser's own may be wrong.
  let ahead = 0;
  const now = () => Date.now() + ahead;

  function learnClock() {
    const shown = document.getElementById("status")?.dataset.now;
    if (shown) ahead = Date.parse(shown) - Date.now();
  }

  function showRelative() {
    for (const each of all("time[data-relative]")) {
      const seconds = Math.round((Date.parse(each.dateTime) - now()) / 1000);
      const text = seconds === 0 ? "now" : seconds > 0 ? "in " + span(seconds) : span(-seconds) + " ago";
      if (each.textContent !== text) each.textContent = text;
    }
  }

  function showInOwnZone() {
    if (document.body.dataset.zone !== "mine") return;
    const pad = (number) => String(number).padStart(2, "0");
    const zone = new Intl.DateTimeFormat().resolvedOptions().timeZone;
    for (const each of all("time")) {
      const at = new Date(each.dateTime);
      if (isNaN(at)) continue;
      const day = [at.getFullYear(), pad(at.getMonth() + 1), pad(at.getDate())].join("-");
      const text = `${day} ${[at.getHours(), at.getMinutes(), at.getSeconds()].map(pad).join(":")}`;
      if (each.hasAttribute("data-relative")) each.title = `${text} ${zone}`;
      else each.textContent = text;
    }
  }

  const likeness = (at) => [at.tagName, at.id, at.getAttribute("href"), at.getAttribute("name"), at.value].join("\n");
  let kept = null;
  document.addEventListener("htmx:configRequest", (event) => {
    const { elt, headers, verb } = event.detail;
    if (verb === "get" && elt.dataset.etag) headers["If-None-Match"] = elt.dataset.etag;
  });
  document.addEventListener("htmx:beforeSwap", (event) => {
    if (event.target.id !== "live") return;
    const focused = event.target.contains(document.activeElement) ? document.activeElement : null;
    kept = {
      focused: focused && likeness(focused),
      boxes: all("input[type=checkbox]:checked", event.target).map((box) => box.value),
      open: all("details[open]", event.target).map((details) => details.id),
    };
  });
  document.addEventListener("htmx:afterSettle", () => {
    if (kept) {
      for (const box of all("#live input[type=checkbox]")) if (kept.boxes.includes(box.value)) box.checked = true;
      for (const details of all("#live details")) if (kept.open.includes(details.id)) details.open = true;
      if (kept.focused) all("#live :is(a, button, input, select, summary)").find((at) => likeness(at) === kept.focused)?.focus({preventScroll: true});
      kept = null;
    }
    show();
  });
  const lost = (is) => document.body.classList.toggle("lost", is);
  document.addEventListener("htmx:sendError", () => lost(true));
  document.addEventListener("htmx:responseError", () => lost(true));
  document.addEventListener("htmx:afterOnLoad", () => lost(false));

  function count() {
    const chosen = all("#live input[name^=name]:checked").length;
    const bar = document.getElementById("chosen");
    if (bar) bar.textContent = chosen ? `${chosen} selected` : "Nothing selected";
  }
  document.addEventListener("change", (event) => {
    if (event.target.id === "all") for (const box of all("#live input[name^=name]")) box.checked = event.target.checked;
    count();
  });

  function show() {
    learnClock();
    showInOwnZone();
    showRelative();
    count();
  }
  const ask = () => {
    if (document.visibilityState === "visible") htmx.trigger(document.body, "live");
  };
  document.addEventListener("visibilitychange", ask);
  setInterval(ask, EVERY);
  setInterval(() => document.visibilityState === "visible" && htmx.trigger(document.body, "why"), 10000);
  setInterval(showRelative, 1000);
  show();
})();

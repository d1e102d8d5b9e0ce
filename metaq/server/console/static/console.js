// What pages do beside htmx: follow a stream of messages, keep parts that load themselves from disturbing whoever is in them, and
// forget the notice of a change. Everything else works without it, too.
"use strict";

const MOST_ROWS = 200;
const MOST_TRIES = 10;
const PAUSE_MS = 3000;

function follow(list) {
  const state = document.getElementById(list.dataset.state);
  const button = document.getElementById(list.dataset.pause);
  let source = null;
  let tries = 0;

  function stop(words) {
    if (source !== null) source.close();
    source = null;
    state.textContent = words;
    button.textContent = "Go on";
  }

  function start() {
    const opened = new EventSource(list.dataset.follow);
    source = opened;
    state.textContent = "connecting";
    button.textContent = "Pause";
    opened.addEventListener("open", () => { tries = 0; state.textContent = "live"; });
    opened.addEventListener("error", () => lost(opened));
    opened.addEventListener("problem", (event) => stop(event.data));
    opened.addEventListener("message", (event) => {
      const made = document.createElement("template");
      made.innerHTML = event.data; // the server has escaped all that is not its own
      list.prepend(made.content);
      while (list.rows.length > MOST_ROWS) list.deleteRow(-1);
    });
  }

  // After a lost connection a browser tries again by itself; after any answer but a stream, as of a broker that starts, it does not.
  function lost(opened) {
    if (opened !== source) return;
    state.textContent = "connecting again";
    if (opened.readyState !== EventSource.CLOSED) return;
    tries += 1;
    if (tries > MOST_TRIES) stop("ended: load the page again");
    else setTimeout(() => { if (opened === source) start(); }, PAUSE_MS);
  }

  button.hidden = false;
  button.addEventListener("click", () => { tries = 0; return source === null ? start() : stop("paused"); });
  start();
}

function chooseAll(box) {
  const boxes = document.querySelectorAll(`#${box.dataset.chooseAll} input[type=checkbox]`);
  box.hidden = false;
  box.addEventListener("change", () => boxes.forEach((each) => { each.checked = box.checked; }));
}

// Whether somebody stands in a part by keyboard, or has selected text in it: it would be lost.
function isInUse(part) {
  const selection = document.getSelection();
  const selects = selection !== null && !selection.isCollapsed && part.contains(selection.anchorNode);
  return selects || part.querySelector(":focus-visible") !== null;
}

function keepPartsQuiet() {
  let scrolled = [];
  document.addEventListener("htmx:beforeRequest", (event) => {
    if (document.hidden || isInUse(event.detail.elt)) event.preventDefault();
  });
  document.addEventListener("htmx:beforeSwap", (event) => {
    scrolled = Array.from(event.detail.target.querySelectorAll(".scroll"), (box) => box.scrollLeft);
  });
  document.addEventListener("htmx:afterSettle", () => {
    document.querySelectorAll("[hx-get] .scroll").forEach((box, number) => { box.scrollLeft = scrolled[number] ?? 0; });
  });
}

function forgetNotice() {
  const here = new URL(window.location.href);
  if (!here.searchParams.has("done")) return;
  here.searchParams.delete("done");
  here.searchParams.delete("count");
  window.history.replaceState(null, "", here);
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("nav [aria-current]").forEach((here) => here.scrollIntoView({ block: "nearest", inline: "nearest" }));
  forgetNotice();
  keepPartsQuiet();
  document.querySelectorAll("[data-follow]").forEach(follow);
  document.querySelectorAll("[data-choose-all]").forEach(chooseAll);
});

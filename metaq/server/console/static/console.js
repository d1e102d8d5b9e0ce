// What pages do beside htmx: follow a stream of messages, and forget the notice of a change. Everything works without it, too.
"use strict";

const MOST_ROWS = 200;

function follow(list) {
  const state = document.getElementById(list.dataset.state);
  const button = document.getElementById(list.dataset.pause);
  let source = null;

  function stop(words) {
    if (source !== null) source.close();
    source = null;
    state.textContent = words;
    button.textContent = "Go on";
  }

  function start() {
    source = new EventSource(list.dataset.follow);
    state.textContent = "waiting for messages";
    button.textContent = "Pause";
    source.addEventListener("open", () => { state.textContent = "live"; });
    source.addEventListener("error", () => { if (source !== null) state.textContent = "connecting again"; });
    source.addEventListener("problem", (event) => stop(event.data));
    source.addEventListener("message", (event) => {
      const made = document.createElement("template");
      made.innerHTML = event.data; // the server has escaped all that is not its own
      list.prepend(made.content);
      while (list.rows.length > MOST_ROWS) list.deleteRow(-1);
    });
  }

  button.hidden = false;
  button.addEventListener("click", () => (source === null ? start() : stop("paused")));
  start();
}

function chooseAll(box) {
  const boxes = document.querySelectorAll(`#${box.dataset.chooseAll} input[type=checkbox]`);
  box.hidden = false;
  box.addEventListener("change", () => boxes.forEach((each) => { each.checked = box.checked; }));
}

function forgetNotice() {
  const here = new URL(window.location.href);
  if (!here.searchParams.has("done")) return;
  here.searchParams.delete("done");
  here.searchParams.delete("count");
  window.history.replaceState(null, "", here);
}

document.addEventListener("DOMContentLoaded", () => {
  forgetNotice();
  document.querySelectorAll("[data-follow]").forEach(follow);
  document.querySelectorAll("[data-choose-all]").forEach(chooseAll);
});

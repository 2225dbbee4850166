// The dashboard: keeps what the stream tells, and shows it.

import { byId, el, keyed, setAttribute, setText } from "./dom.js";
import { ago, count, exact, ms, share } from "./format.js";
import { DrainDialog, showFleet } from "./fleet.js";
import { Lanes } from "./lanes.js";
import { showReuse } from "./reuse.js";
import { showDivergences, showSessions } from "./sessions.js";
import { Stream } from "./stream.js";
import { showDecisions, showSlowest } from "./turns.js";

const KEY_NAME = "moongate-admin-key";
const STATES = {
  connecting: "connecting",
  live: "live",
  gone: "no connection",
  locked: "needs the key",
  paused: "paused",
};

let parts = {};
let latest = 0; // seconds of the gateway
let state = "connecting";
let states = new Map(); // of instances, to announce what changes
const lanes = new Lanes();
const drainDialog = new DrainDialog(changeInstance);
const stream = new Stream(takeFrame, setState);

function takeFrame(frame) {
  if (frame.now_s < latest) lanes.forget(); // another process: it counts anew
  latest = frame.now_s;
  parts = frame.is_whole ? frame.parts : { ...parts, ...frame.parts };
  lanes.tell(frame.now_s);
  setState("live");
  show(frame.now_s);
}

function show(now) {
  const { gateway, totals, instances, sessions, decisions, slowest, divergences, reuse } = parts;
  const alone = gateway.others ? ` \u00b7 one of ${gateway.others + 1} gateways, whose own turns are shown` : "";
  setText(byId("about"), `${gateway.version} \u00b7 policy ${gateway.policy} \u00b7 ${gateway.models.join(", ") || "no model"} \u00b7 up ${ago(now)}${alone}`);
  showNumbers(totals);
  showBanner(gateway);
  lanes.note(decisions);
  lanes.show(instances.shown, sessions.shown);
  showFleet(instances, (id, isDraining) => drainDialog.ask(id, isDraining));
  showReuse(reuse, now);
  showDecisions(decisions, now);
  showSlowest(slowest, now);
  showSessions(sessions, divergences, now);
  showDivergences(divergences, sessions.shown, now);
  announceStates(instances.shown);
}

function showNumbers(totals) {
  const prompt = totals.device_tokens + totals.pool_tokens + totals.recompute_tokens;
  const shown = [
    ["requests", exact(totals.requests), `${exact(totals.active_requests)} under way`],
    ["reuse", share(totals.device_tokens + totals.pool_tokens, prompt), "of prompt tokens, expected"],
    ["delivered", count(totals.delivered_cached_tokens), "cached tokens, as engines said"],
    ["prompt tokens", count(prompt), `${count(totals.recompute_tokens)} computed`],
    ["first token", ms(totals.ttft_ms_p50), totals.turns_seen ? `median of ${exact(totals.turns_seen)} turns` : "no turn yet"],
    ["trouble", exact(totals.rejected + totals.broken_off), `refused or broken off; ${exact(totals.retries)} retries`],
  ];
  keyed(byId("numbers"), shown, ([name]) => name, newNumber, (element, [name, value, detail]) => {
    [name, value, detail].forEach((text, place) => setText(element.children[place], text));
  });
}

function newNumber([name]) {
  return el("div", { "data-name": name }, el("dt"), el("dd"), el("dd", { class: "quiet" }));
}

function showBanner(gateway) {
  const banner = byId("banner");
  const reasons = gateway.unready_reasons;
  banner.hidden = state === "live" && !reasons.length;
  if (state === "live" && reasons.length) setText(banner, `No request can be routed: ${reasons.join("; ")}.`);
}

function announceStates(instances) {
  const now = new Map(instances.map((instance) => [instance.id, instance.state]));
  const changed = [...now].filter(([id, value]) => states.has(id) && states.get(id) !== value);
  const gone = [...states.keys()].filter((id) => !now.has(id));
  const said = [...changed.map(([id, value]) => `${id} is ${value}`), ...gone.map((id) => `${id} is gone`)];
  if (said.length) announce(said.join(", "));
  states = now;
}

function announce(text) {
  setText(byId("announcer"), text);
}

// --- the connection -------------------------------------------------------------------------------------------------

function setState(next, detail) {
  if (next === "locked") askForKey(detail);
  if (next === state && next !== "gone") return;
  if (next !== state && !(next === "connecting" || state === "connecting")) announce(`Dashboard: ${STATES[next]}`);
  state = next;
  setAttribute(byId("connection"), "data-state", next);
  setText(byId("connection-text"), STATES[next]);
  document.body.classList.toggle("stale", next === "gone");
  const banner = byId("banner");
  banner.hidden = next !== "gone";
  if (next === "gone") setText(banner, `The gateway does not answer (${detail}). What is shown is from before; trying again.`);
  byId("key-button").hidden = stream.key === null && next !== "locked";
  setText(byId("key-button"), next === "locked" ? "Enter the key" : "Forget the key");
}

// --- the key --------------------------------------------------------------------------------------------------------

function askForKey(wasWrong) {
  sessionStorage.removeItem(KEY_NAME);
  const error = byId("key-error");
  error.hidden = !wasWrong;
  setText(error, wasWrong ? "That is not the key." : "");
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key-input").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key-input").value.trim();
  // A header can't carry anything else.
  if (!/^[\x21-\x7e]+$/.test(key)) {
    byId("key-error").hidden = false;
    setText(byId("key-error"), "A key has letters, digits and signs, without spaces.");
    return;
  }
  sessionStorage.setItem(KEY_NAME, key);
  byId("key-input").value = "";
  byId("key-dialog").close();
  stream.start(key);
});

byId("key-button").addEventListener("click", () => {
  if (state === "locked") {
    byId("key-dialog").showModal();
    return;
  }
  sessionStorage.removeItem(KEY_NAME);
  location.reload();
});

/** Post to an operators' route. Return null, or what went wrong. */
async function changeInstance(path) {
  const headers = stream.key === null ? {} : { authorization: `Bearer ${stream.key}` };
  try {
    const response = await fetch(path, { method: "POST", headers, cache: "no-store" });
    if (response.ok) return null;
    const answer = await response.json();
    return `Refused: ${answer.error.message}.`;
  } catch {
    return "The gateway does not answer.";
  }
}

// Nothing is made for a page that nobody looks at.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    stream.stop();
    setState("paused");
  } else if (state === "paused") {
    stream.start(sessionStorage.getItem(KEY_NAME));
  }
});

stream.start(sessionStorage.getItem(KEY_NAME));

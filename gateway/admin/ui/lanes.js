// Who holds which sessions' prefixes, a lane for each instance; and the decisions of the last minute, which drift by.

import { byId, el, keyed, setAttribute, setText, showEmpty, svg } from "./dom.js";
import { count, hue, REASONS, reasonText, sessionName } from "./format.js";

const WINDOW_S = 60;
const DECISIONS_MAX = 600; // in the picture; what comes faster is told as a number
const FRAME_MS = 66;
const LANE_HEIGHT = 22;

const stillness = matchMedia("(prefers-reduced-motion: reduce)");
const darkness = matchMedia("(prefers-color-scheme: dark)");
const shapes = Object.fromEntries(Object.entries(REASONS).map(([name, { path }]) => [name, new Path2D(path)]));

export class Lanes {
  constructor() {
    this.decisions = [];
    this.lastNumber = 0;
    this.offset = 0; // of the gateway's seconds from ours
    this.colours = {};
    this.drawn = 0;
    for (const [name, { text }] of Object.entries(REASONS)) {
      const mark = svg("svg", { viewBox: "-7 -7 14 14", class: `reason-${name}`, "aria-hidden": "true" });
      mark.append(svg("path", { d: REASONS[name].path }));
      byId("reasons").append(el("li", {}, mark, text));
    }
    darkness.addEventListener("change", () => (this.colours = {}));
    const tick = (at) => {
      requestAnimationFrame(tick);
      const pause = stillness.matches ? 1000 : FRAME_MS;
      if (at - this.drawn >= pause) {
        this.drawn = at;
        this.draw();
      }
    };
    requestAnimationFrame(tick);
  }

  tell(now) {
    this.offset = now - performance.now() / 1000;
  }

  now() {
    return performance.now() / 1000 + this.offset;
  }

  forget() {
    this.decisions = [];
    this.lastNumber = 0;
  }

  note(part) {
    const fresh = part.shown.filter((decision) => decision.number > this.lastNumber);
    this.decisions.push(...fresh);
    this.lastNumber = part.count;
    const since = this.now() - WINDOW_S;
    this.decisions = this.decisions.filter((decision) => decision.at_s >= since).slice(-DECISIONS_MAX);
  }

  show(instances, sessions) {
    const lanes = instances.map((instance) => laneOf(instance, sessions));
    const pooled = sessions.filter((session) => session.pool_tokens > 0);
    if (pooled.length) {
      const parts = pooled.map((session) => ({ session, tokens: session.pool_tokens, sure: session.pool_tokens }));
      parts.sort(byNumber);
      lanes.push({ id: "\u0000pool", name: "shared pool", state: "", parts, isPool: true });
    }
    const longest = Math.max(0, ...lanes.map((lane) => sum(lane.parts)));
    const scale = niceCeiling(longest);
    keyed(byId("lanes"), lanes, (lane) => lane.id, newLane, (element, lane) => fillLane(element, lane, scale));
    showEmpty("lanes-empty", !instances.length);
    byId("lanes-foot").hidden = !instances.length;
    setText(byId("lanes-scale"), longest ? `A full row is ${count(scale)} tokens.` : "No prefix is held yet.");
    this.describe();
  }

  /** Tell in words what the moving marks show. */
  describe() {
    const since = this.now() - WINDOW_S;
    for (const lane of byId("lanes").children) {
      const strip = lane.querySelector("canvas");
      if (!strip) continue;
      const reasons = {};
      for (const decision of this.decisions) {
        if (decision.instance === lane.dataset.key && decision.at_s >= since) {
          reasons[decision.reason] = (reasons[decision.reason] ?? 0) + 1;
        }
      }
      const told = Object.entries(reasons).map(([reason, times]) => `${times} ${reasonText(reason)}`);
      setAttribute(strip, "aria-label", told.length ? `Last minute's decisions: ${told.join(", ")}` : "No decision in the last minute");
    }
  }

  draw() {
    const now = this.now();
    for (const lane of byId("lanes").children) {
      const strip = lane.querySelector("canvas");
      if (strip) this.drawStrip(strip, lane.dataset.key, now);
    }
  }

  drawStrip(strip, instance, now) {
    const ratio = devicePixelRatio || 1;
    const width = strip.clientWidth;
    if (strip.width !== Math.round(width * ratio)) {
      strip.width = Math.round(width * ratio);
      strip.height = Math.round(LANE_HEIGHT * ratio);
    }
    const context = strip.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, LANE_HEIGHT);
    for (const decision of this.decisions) {
      const age = now - decision.at_s;
      if (decision.instance !== instance || age > WINDOW_S) continue;
      const x = Math.min(width - 8, (width - 8) * (1 - age / WINDOW_S));
      // Those that came together are told apart by their height.
      const y = LANE_HEIGHT / 2 + ((decision.number % 3) - 1) * 4;
      context.setTransform(ratio, 0, 0, ratio, x * ratio, y * ratio);
      context.globalAlpha = Math.max(0.35, 1 - age / WINDOW_S);
      context.fillStyle = this.colourOf(decision.reason);
      context.fill(shapes[decision.reason] ?? shapes.only_choice);
    }
    context.globalAlpha = 1;
  }

  colourOf(reason) {
    this.colours[reason] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${reason.replaceAll("_", "-")}`) || "gray";
    return this.colours[reason];
  }
}

function laneOf(instance, sessions) {
  const parts = [];
  for (const session of sessions) {
    const held = session.held.filter((one) => one.instance === instance.id);
    const tokens = Math.max(0, ...held.map((one) => one.expected_tokens));
    const sure = Math.max(0, ...held.map((one) => one.tokens));
    if (tokens) parts.push({ session, tokens, sure, isHome: session.instance === instance.id });
  }
  parts.sort(byNumber);
  return { id: instance.id, name: instance.id, state: instance.state, parts, isPool: false };
}

function newLane(lane) {
  const element = el("div", { class: "lane" });
  element.append(el("div", { class: "lane-name" }, el("span", { class: "name" }), el("span", { class: "state" })));
  const rows = el("div", { class: "lane-rows" });
  rows.append(el("div", { class: "track", role: "img" }));
  if (!lane.isPool) rows.append(el("canvas", { class: "strip", role: "img", height: LANE_HEIGHT }));
  element.append(rows);
  return element;
}

function fillLane(element, lane, scale) {
  const [name, state] = element.firstElementChild.children;
  setText(name, lane.name);
  setText(state, lane.state === "up" ? "" : lane.state);
  setAttribute(state, "data-state", lane.state);
  const track = element.querySelector(".track");
  const told = lane.parts.map((part) => `${sessionName(part.session)} ${count(part.tokens)} tokens`);
  setAttribute(track, "aria-label", `${lane.name} holds ${told.length ? told.join(", ") : "no session's prefix"}`);
  keyed(
    track,
    lane.parts,
    (part) => part.session.number,
    (part) => el("span", { class: `held ${hue(part.session.number)}` }, el("span")),
    (bar, part) => {
      const width = (100 * part.tokens) / scale;
      bar.style.width = `${width}%`;
      bar.classList.toggle("predicted", part.sure < part.tokens / 2);
      bar.classList.toggle("away", !lane.isPool && !part.isHome);
      const title = `${sessionName(part.session)}: ${count(part.tokens)} tokens${part.sure < part.tokens ? `, ${count(part.sure)} of them confirmed` : ""}`;
      setAttribute(bar, "title", title);
      setText(bar.firstElementChild, width > 6 ? sessionName(part.session) : "");
    },
  );
}

function byNumber(one, other) {
  return one.session.number - other.session.number;
}

function sum(parts) {
  return parts.reduce((total, part) => total + part.tokens, 0);
}

/** The next of 1, 2, 3, 5 times a power of ten: a scale that rarely changes. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 100)));
  return power * [1, 1.5, 2, 3, 5, 7.5, 10].find((step) => step * power >= value);
}

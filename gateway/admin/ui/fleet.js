// The instances: state, load, KV use; and to drain them.

import { byId, el, keyed, setAttribute, setText, showEmpty } from "./dom.js";
import { count, share } from "./format.js";

const TIERS = ["device", "host", "disk", "pool"];

/** Show the fleet. `onDrain(instance, isDraining)` is called when a button is pressed. */
export function showFleet(part, onDrain) {
  keyed(byId("fleet"), part.shown, (instance) => instance.id, (instance) => newCard(instance, onDrain), fillCard);
  showEmpty("fleet-empty", !part.shown.length);
  const more = byId("fleet-more");
  more.hidden = part.count <= part.shown.length;
  setText(more, `and ${part.count - part.shown.length} more; /admin/instances has all`);
}

function newCard(instance, onDrain) {
  const button = el("button", { type: "button" });
  const card = el("article", { class: "card" });
  const meter = el("div", { class: "meter", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 }, el("span", { class: "fill" }));
  card.append(
    el("div", { class: "card-head" }, el("h3"), el("span", { class: "pill" }, el("span", { class: "mark", "aria-hidden": "true" }), el("span"))),
    el("p", { class: "quiet facts" }),
    el("dl", { class: "pairs" }),
    el("div", { class: "kv" }, el("span", { class: "kv-text" }), meter),
    button,
  );
  // The card shows another state by then, perhaps; its own data tell which.
  button.addEventListener("click", () => onDrain(card.dataset.key, card.dataset.state === "draining"));
  return card;
}

function fillCard(card, instance) {
  const [head, facts, pairs, kv, button] = card.children;
  setText(head.children[0], instance.id);
  setAttribute(head.children[1], "data-state", instance.state);
  setText(head.children[1].lastElementChild, instance.state);
  card.dataset.state = instance.state;
  const trusts = [...new Set(instance.caches.map((cache) => cache.trust))].join(", ");
  setText(facts, `role ${instance.role} \u00b7 trust ${trusts} \u00b7 ${instance.models.join(", ") || "no model known"}`);
  const total = (read) => instance.caches.reduce((sum, cache) => sum + read(cache), 0);
  const held = Object.fromEntries(TIERS.map((tier) => [tier, total((cache) => cache.tokens_held[tier])]));
  const blocks = (tokens) => count(instance.block_size_tokens ? tokens / instance.block_size_tokens : null);
  const shown = [
    ["requests", count(total((cache) => cache.active_requests))],
    ["queued prefill", `${count(total((cache) => cache.queued_prefill_tokens))} tokens`],
    ...TIERS.filter((tier) => tier === "device" || held[tier]).map((tier) => [`${tier} blocks`, blocks(held[tier])]),
  ];
  keyed(pairs, shown, ([name]) => name, newPair, (pair, [name, value]) => {
    setText(pair.children[0], name);
    setText(pair.children[1], value);
  });
  fillMeter(kv, instance, held.device, total((cache) => cache.predicted_tokens));
  setText(button, instance.state === "draining" ? `Undrain ${instance.id}` : `Drain ${instance.id}`);
}

function newPair() {
  return el("div", {}, el("dt"), el("dd"));
}

/** KV use: what events say is on the device; where no events come, what was forwarded. */
function fillMeter(kv, instance, device, predicted) {
  const [text, meter] = kv.children;
  const capacity = (instance.capacity_tokens ?? 0) * instance.caches.length;
  const isAssumed = !device && predicted > 0;
  const tokens = isAssumed ? predicted : device;
  const percent = capacity ? Math.min(100, (100 * tokens) / capacity) : 0;
  const told = capacity ? `${share(tokens, capacity)} of ${count(capacity)} tokens` : `${count(tokens)} tokens, capacity not known`;
  setText(text, `KV ${isAssumed ? "(assumed) " : ""}${told}`);
  setAttribute(meter, "aria-valuenow", percent.toFixed(1));
  setAttribute(meter, "aria-label", `KV use of ${instance.id}: ${told}`);
  meter.firstElementChild.style.width = `${percent}%`;
}

/** Ask whether to drain or undrain, and do it. `send(path)` returns null, or what went wrong. */
export class DrainDialog {
  constructor(send) {
    this.send = send;
    this.dialog = byId("drain-dialog");
    this.path = "";
    byId("drain-cancel").addEventListener("click", () => this.dialog.close());
    byId("drain-confirm").addEventListener("click", () => this.confirm());
  }

  ask(id, isDraining) {
    const verb = isDraining ? "Undrain" : "Drain";
    this.path = `admin/instances/${encodeURIComponent(id)}/${verb.toLowerCase()}`;
    setText(byId("drain-title"), `${verb} ${id}?`);
    setText(byId("drain-text"), isDraining ? "It gets work again." : "It gets no more work until it is undrained. What it has under way goes on.");
    setText(byId("drain-confirm"), verb);
    byId("drain-error").hidden = true;
    byId("drain-confirm").disabled = false;
    this.dialog.showModal();
  }

  async confirm() {
    const button = byId("drain-confirm");
    button.disabled = true;
    const problem = await this.send(this.path);
    button.disabled = false;
    if (problem === null) {
      this.dialog.close();
      return;
    }
    byId("drain-error").hidden = false;
    setText(byId("drain-error"), problem);
  }
}

// Turns: the latest decisions, and the slowest ones with their receipts.

import { byId, el, fillCells, keyed, rowOf, setAttribute, setText, showEmpty } from "./dom.js";
import { ago, count, exact, ms, reasonText, sessionName, share } from "./format.js";

const LATEST = 12;

export function showDecisions(part, now) {
  const latest = part.shown.slice(0, LATEST);
  keyed(byId("decisions"), latest, (turn) => turn.number, () => rowOf(7, [4, 5, 6]), (row, turn) => {
    fillCells(row, [
      ago(now - turn.at_s),
      sessionName(turn.session),
      placeOf(turn),
      reasonText(turn.reason),
      count(turn.prompt_tokens),
      share(turn.device_tokens + turn.pool_tokens, turn.prompt_tokens),
      ms(turn.ttft_ms),
    ]);
    setAttribute(row.children[3], "class", `reason reason-${cssName(turn.reason)}`);
  });
  showEmpty("decisions-empty", !latest.length);
}

function placeOf(turn) {
  return turn.prefill_instance ? `${turn.prefill_instance} \u2192 ${turn.instance}` : turn.instance;
}

/** A reason as a class name; whatever else it may be becomes nothing special. */
function cssName(reason) {
  return /^[a-z_]+$/.test(reason) ? reason : "other";
}

export function showSlowest(turns, now) {
  keyed(byId("slowest"), turns, (turn) => turn.number, newReceipt, (element, turn) => fillReceipt(element, turn, now));
  showEmpty("slowest-empty", !turns.length);
}

function newReceipt() {
  const region = el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Candidates" }, el("table", {}, el("thead", {}, el("tr")), el("tbody")));
  return el("details", { class: "receipt" }, el("summary", {}, el("strong"), " ", el("span"), " ", el("span", { class: "quiet" })), el("p"), region);
}

function fillReceipt(element, turn, now) {
  const [summary, after, region] = element.children;
  const [time, what, when] = summary.children;
  setText(time, ms(turn.ttft_ms));
  setText(what, `${sessionName(turn.session)} on ${placeOf(turn)}: ${reasonText(turn.reason)}`);
  setText(when, `${ago(now - turn.at_s)} ago`);
  setText(after, afterwards(turn));
  fillCandidates(region.firstElementChild, turn);
}

function afterwards(turn) {
  const expected = (turn.device_tokens ?? 0) + (turn.pool_tokens ?? 0);
  const said = [`Prompt ${exact(turn.prompt_tokens)} tokens, ${exact(expected)} of them expected to be reused (${exact(turn.device_tokens)} device, ${exact(turn.pool_tokens)} pool)`];
  said.push(turn.delivered_tokens === null || turn.delivered_tokens === undefined ? "the engine did not say how many were" : `the engine reused ${exact(turn.delivered_tokens)}`);
  said.push(`first token after ${ms(turn.ttft_ms)}`);
  said.push(turn.e2e_ms === null || turn.e2e_ms === undefined ? "its answer goes on" : `answered with ${turn.status} after ${ms(turn.e2e_ms)}`);
  if (turn.attempts > 1) said.push(`${turn.attempts} attempts`);
  return `${said.join("; ")}. Policy ${turn.policy}.`;
}

/** Candidates best first: the chosen one, the runner-up, the others; a column for each cost term. */
function fillCandidates(table, turn) {
  const candidates = turn.candidates ?? [];
  const termsOf = (candidate) => candidate.cost_terms_ms ?? candidate.terms ?? {};
  const terms = [...new Set(candidates.flatMap((candidate) => Object.keys(termsOf(candidate))))];
  const heads = ["Candidate", "Device", "Pool", "Requests", "Queued", "Cost", ...terms.map((term) => term.replaceAll("_", " "))];
  const [headRow, body] = [table.tHead.firstElementChild, table.tBodies[0]];
  keyed(headRow, heads, (head) => head, (head) => el("th", { scope: "col", class: head === "Candidate" ? null : "number" }), setText);
  const numbers = heads.map((_, place) => place).slice(1);
  keyed(
    body,
    candidates.map((candidate, place) => ({ ...candidate, place })),
    // A row has as many cells as there are terms.
    (candidate) => `${candidate.place} ${heads.length}`,
    () => rowOf(heads.length, numbers, 0),
    (row, candidate) => {
      const note = candidate.place === 0 ? " (chosen)" : candidate.place === 1 ? " (runner-up)" : "";
      const name = candidate.rank === null || candidate.rank === undefined ? candidate.instance : `${candidate.instance}@${candidate.rank}`;
      fillCells(row, [
        name + note,
        exact(candidate.overlap_tokens.device),
        exact(candidate.overlap_tokens.pool),
        exact(candidate.active_requests),
        exact(candidate.queued_prefill_tokens),
        ms(candidate.cost_ms),
        ...terms.map((term) => ms(termsOf(candidate)[term])),
      ]);
    },
  );
}

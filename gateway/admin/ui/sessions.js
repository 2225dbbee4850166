// Sessions, and those whose turns did not begin like the turn before.

import { byId, el, fillCells, keyed, rowOf, setAttribute, setText, showEmpty } from "./dom.js";
import { ago, count, exact, holderName, hue, sessionName } from "./format.js";

const HOLDERS_MAX = 4;
const CAUSES = {
  salt: "another cache salt",
  system: "the system prompt was changed",
  tools: "the tools were changed",
  tools_order: "the tools came in another order",
  history: "an earlier message was changed or left out",
  template: "the same messages, rendered otherwise",
};

export function showSessions(part, divergences, now) {
  const latest = new Map();
  for (const report of [...divergences].reverse()) latest.set(report.session, report);
  keyed(byId("sessions"), part.shown, (session) => session.number, newRow, (row, session) => {
    setAttribute(row.firstElementChild.firstElementChild, "class", `swatch ${hue(session.number)}`);
    setText(row.firstElementChild.lastElementChild, sessionName(session));
    const most = [...session.held].sort((one, other) => other.expected_tokens - one.expected_tokens);
    const held = most.slice(0, HOLDERS_MAX).map((one) => `${holderName(one)} ${count(one.expected_tokens)}`);
    if (most.length > HOLDERS_MAX) held.push(`${most.length - HOLDERS_MAX} more`);
    if (session.pool_tokens) held.push(`pool ${count(session.pool_tokens)}`);
    const report = latest.get(session.hash);
    const cells = [
      session.model,
      session.turns,
      count(session.prompt_tokens),
      held.join(", ") || "nobody",
      report ? `${causeOf(report)}: ${count(report.lost_tokens)} tokens` : "",
      ago(now - session.at_s),
    ];
    cells.forEach((text, place) => setText(row.children[place + 1], text));
  });
  showEmpty("sessions-empty", !part.shown.length);
}

function newRow() {
  const row = rowOf(7, [2, 3], 0);
  row.firstElementChild.append(el("span", { class: "swatch", "aria-hidden": "true" }), el("span"));
  row.children[4].classList.add("wrap");
  row.children[5].classList.add("wrap");
  return row;
}

/** `sessions`: those that are shown, for the names of the ones that have diverged. */
export function showDivergences(reports, sessions, now) {
  const names = new Map(sessions.map((session) => [session.hash, sessionName(session)]));
  keyed(byId("divergences"), reports, (report) => `${report.at_s} ${report.session}`, () => rowOf(6, [4, 5]), (row, report) => {
    fillCells(row, [
      ago(now - report.at_s),
      names.get(report.session) ?? report.session,
      causeOf(report),
      placeOf(report),
      exact(report.lost_tokens),
      exact(report.could_reuse_tokens),
    ]);
  });
  showEmpty("divergences-empty", !reports.length);
}

function causeOf(report) {
  return CAUSES[report.cause] ?? String(report.cause);
}

function placeOf(report) {
  const said = [];
  if (report.message !== undefined) said.push(`message ${report.message}`);
  if (report.role) said.push(`(${report.role})`);
  if (report.byte !== undefined) said.push(`near byte ${exact(report.byte)}`);
  return said.join(" ");
}

// Prompt tokens by source over the last ten minutes, as stacked bars and as a table.

import { byId, fillCells, keyed, rowOf, setAttribute, setText, showEmpty, svg } from "./dom.js";
import { ago, count, exact, share } from "./format.js";

const PERIOD_S = 10;
const PERIODS = 60;
const WIDTH = 600;
const HEIGHT = 170;
const SOURCES = ["device", "pool", "recompute"];

/** `periods`: [began at, device, pool, recompute] of each that had a turn. */
export function showReuse(periods, now) {
  const current = Math.ceil(now / PERIOD_S);
  const recent = periods.filter(([at]) => now - at < PERIOD_S * PERIODS);
  const top = Math.max(1, ...recent.map(([, ...tokens]) => total(tokens)));
  const bars = recent.flatMap(([at, ...tokens]) => {
    const place = PERIODS - Math.max(1, Math.round(current - at / PERIOD_S));
    return SOURCES.map((source, number) => ({
      key: `${at} ${source}`,
      source,
      x: (place * WIDTH) / PERIODS,
      below: total(tokens.slice(0, number)),
      tokens: tokens[number],
    })).filter((bar) => bar.tokens > 0);
  });
  keyed(byId("reuse"), bars, (bar) => bar.key, newBar, (rect, bar) => {
    const height = (HEIGHT * bar.tokens) / top;
    setAttribute(rect, "x", (bar.x + 0.75).toFixed(2));
    setAttribute(rect, "y", (HEIGHT - (HEIGHT * bar.below) / top - height).toFixed(2));
    setAttribute(rect, "height", height.toFixed(2));
  });
  const sums = SOURCES.map((_, number) => total(recent.map((period) => period[number + 1])));
  const told = `Prompt tokens of the last ten minutes: device ${count(sums[0])} (${share(sums[0], total(sums))}), pool ${count(sums[1])}, recomputed ${count(sums[2])}.`;
  setAttribute(byId("reuse"), "aria-label", recent.length ? told : "No turn in the last ten minutes.");
  setText(byId("reuse-top"), recent.length ? `highest: ${count(top)} tokens in 10 s` : "");
  showEmpty("reuse-empty", !recent.length);
  byId("reuse-chart").hidden = !recent.length;
  fillTable([...recent].reverse(), now);
}

function newBar(bar) {
  return svg("rect", { class: `source-${bar.source}`, width: WIDTH / PERIODS - 1.5 });
}

function fillTable(periods, now) {
  keyed(byId("reuse-rows"), periods, ([at]) => at, () => rowOf(4, [1, 2, 3], 0), (row, [at, ...tokens]) => {
    fillCells(row, [ago(now - at), ...tokens.map(exact)]);
  });
}

function total(values) {
  return values.reduce((sum, value) => sum + value, 0);
}

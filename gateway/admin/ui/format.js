// Numbers, times and names as people read them.

/** 950, 12.3 k, 4.56 M. */
export function count(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value < 10_000) return String(Math.round(value));
  if (value < 999_500) return `${(value / 1000).toFixed(value < 99_950 ? 1 : 0)} k`;
  return `${(value / 1_000_000).toFixed(2)} M`;
}

export function exact(value) {
  return value === null || value === undefined ? "\u2013" : value.toLocaleString("en");
}

export function ms(value) {
  if (value === null || value === undefined) return "\u2013";
  return value < 10_000 ? `${value < 10 ? value.toFixed(1) : Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}

export function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)} %` : "\u2013";
}

/** How long ago, in steps that don't flicker. */
export function ago(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  return `${Math.floor(whole / 3600)} h`;
}

/** What a session is called: its key as the client gave it, else by its number. */
export function sessionName(session) {
  return session.key ?? `no key, #${session.number}`;
}

/** A class that gives each session one of ten colours. */
export function hue(number) {
  return `hue-${number % 10}`;
}

export function holderName(held) {
  return held.rank === null || held.rank === undefined ? held.instance : `${held.instance}@${held.rank}`;
}

export const REASONS = {
  device_prefix: { text: "holds the prefix", path: "M0-5A5 5 0 1 0 0 5A5 5 0 1 0 0-5Z" },
  pool_prefix: { text: "prefix from the pool", path: "M0-6L6 0L0 6L-6 0Z" },
  session: { text: "its session's home", path: "M-5-2H-2V-5H2V-2H5V2H2V5H-2V2H-5Z" },
  load: { text: "least work", path: "M0-6L6 5H-6Z" },
  only_choice: { text: "only choice", path: "M-5-5H5V5H-5Z" },
  fallback: { text: "prompt not read", path: "M-5-3L-3-5L0-2L3-5L5-3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z" },
};

export function reasonText(reason) {
  return REASONS[reason]?.text ?? String(reason);
}

// The live stream: read with fetch, so that the key goes in a header; begins anew by itself.

const SILENCE_MS = 5000; // frames come twice a second
const PAUSES_MS = [500, 1000, 2000, 4000];

/**
 * Follows `/admin/live`. Calls `onFrame(frame)`, and `onState(state, detail)` with one of connecting, live, gone,
 * locked (a key is needed; `detail` tells whether one was sent) and paused (nobody looks at the page).
 */
export class Stream {
  constructor(onFrame, onState) {
    this.onFrame = onFrame;
    this.onState = onState;
    this.key = null;
    this.run = 0;
    this.aborter = null;
  }

  start(key) {
    this.stop();
    this.key = key;
    this.follow(++this.run);
  }

  stop() {
    this.run++;
    this.aborter?.abort();
  }

  async follow(run) {
    this.onState("connecting");
    for (let failures = 0; run === this.run; failures++) {
      try {
        const response = await this.open();
        if (run !== this.run) return;
        if (response.status === 401) {
          this.onState("locked", this.key !== null);
          return;
        }
        if (!response.ok) throw new Error(await problemOf(response));
        failures = 0;
        await this.read(response, run);
        throw new Error("the gateway ended the stream");
      } catch (error) {
        if (run !== this.run) return;
        this.onState("gone", messageOf(error));
      } finally {
        clearTimeout(this.timer);
      }
      await new Promise((done) => setTimeout(done, PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)]));
    }
  }

  open() {
    this.aborter = new AbortController();
    this.listenFor();
    const headers = this.key === null ? {} : { authorization: `Bearer ${this.key}` };
    return fetch("admin/live", { headers, cache: "no-store", signal: this.aborter.signal });
  }

  /** Give up on this connection when nothing comes for a while. */
  listenFor() {
    clearTimeout(this.timer);
    const aborter = this.aborter;
    this.timer = setTimeout(() => aborter.abort(), SILENCE_MS);
  }

  async read(response, run) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done || run !== this.run) return;
      this.listenFor();
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "));
        if (data) this.onFrame(JSON.parse(data.slice(6)));
      }
    }
  }
}

async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `it answers ${response.status}`;
  }
}

function messageOf(error) {
  if (error.name === "AbortError") return "it is silent";
  return error instanceof TypeError ? "it can't be reached" : error.message;
}

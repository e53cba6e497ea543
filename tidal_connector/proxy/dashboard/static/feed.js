// SPDX-License-Identifier: Apache-2.0
// Asks the proxy again and again, remembers the past in this browser's own time, and knows how old what it has is.

const PATIENCE_MS = 8000;
const MOST_ROWS = 2000;

class Feed {
  constructor(onAnswer, onAge) {
    this.onAnswer = onAnswer;
    this.onAge = onAge;
    this.rows = [];       // [milliseconds of performance.now(), value of each further column ...]
    this.restarts = [];   // milliseconds
    this.boots = new Set(); // lives of proxies that have answered
    this.mixed = false;     // an earlier one answered again: there is more than one behind this address
    this.answer = null;
    this.heard = null;    // milliseconds of the last answer
    this.tries = 0;
    this.timer = null;
    this.asking = null;
  }

  start() {
    document.addEventListener('visibilitychange', () => { if (!document.hidden) this.ask(); });
    window.addEventListener('online', () => this.ask());
    setInterval(() => this.age(), 1000);
    this.ask();
  }

  async ask() {
    clearTimeout(this.timer);
    if (this.asking) return;
    const bound = new AbortController();
    const alarm = setTimeout(() => bound.abort(), PATIENCE_MS);
    this.asking = bound;
    let wait = 0;
    try {
      const since = this.answer ? `?since=${this.answer.sequence}&boot=${encodeURIComponent(this.answer.boot)}` : '';
      const response = await fetch(`/dashboard/data${since}`, { signal: bound.signal, cache: 'no-store', credentials: 'same-origin' });
      if (!response.ok) throw new Error(`status ${response.status}`);
      this.take(await response.json());
      this.tries = 0;
      wait = Math.max(0.5, Math.min(30, this.answer.every_s)) * (document.hidden ? 4 : 1);
    } catch {
      this.tries += 1;
      wait = Math.min(5, 0.5 * 2 ** Math.min(this.tries, 4));
    } finally {
      clearTimeout(alarm);
      this.asking = null;
    }
    this.age();
    this.timer = setTimeout(() => this.ask(), wait * 1000);
  }

  take(answer) {
    const now = performance.now();
    if (this.answer && this.answer.boot !== answer.boot) {
      this.mixed = this.mixed || this.boots.has(answer.boot);
      if (this.mixed) { this.rows = []; this.restarts = []; } else this.restarts.push(now - answer.now_s * 1000);
    }
    this.boots.add(answer.boot);
    for (const [at, ...values] of answer.rows) this.rows.push([now - (answer.now_s - at) * 1000, ...values]);
    const oldest = now - answer.keep_s * 1000;
    while (this.rows.length && (this.rows[0][0] < oldest || this.rows.length > MOST_ROWS)) this.rows.shift();
    this.restarts = this.restarts.filter((at) => at > oldest);
    this.answer = answer;
    this.heard = now;
    this.columns = Object.fromEntries(answer.columns.map((name, index) => [name, index]));
    this.onAnswer(this);
  }

  // live: as it is now; late: the proxy answers, and has not looked lately; lost: the proxy does not answer.
  age() {
    const since = this.heard === null ? null : (performance.now() - this.heard) / 1000;
    if (this.tries > 0) return this.onAge('lost', since);
    if (since === null) return this.onAge('waiting', null);
    const newest = this.rows.length ? (performance.now() - this.rows[this.rows.length - 1][0]) / 1000 : since;
    return newest > 3 * this.answer.every_s + 4 ? this.onAge('late', newest) : this.onAge('live', newest);
  }

  latest(column) {
    const row = this.rows[this.rows.length - 1];
    return row ? row[this.columns[column]] : null;
  }
}

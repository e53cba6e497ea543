// SPDX-License-Identifier: Apache-2.0
// Small charts that share one stretch of time and one cursor.

const SPANS = [60, 300, 900]; // seconds
const GAP_MS = 40000;       // no line over a stretch in which nobody looked
const PLOT = { top: 17, bottom: 17 };

const CHARTS = [
  {
    id: 'requests', title: 'Requests', unit: (value) => [digits(value), '/s'], floor: 1,
    series: [{ column: 'requests_s', kind: 'line fill' }, { column: 'failed_s', kind: 'bad fill' }],
    sub: (at, totals) => [
      [at('failed_s') > 0 ? `${digits(at('failed_s'))} /s failed` : 'none failed', at('failed_s') > 0 ? 'bad' : ''],
      totals ? [` · ${many(totals.retries_minute, 'retry').replace('retrys', 'retries')} last minute`, ''] : ['', ''],
    ],
  },
  {
    id: 'inside', title: 'Requests in flight', unit: (value) => [digits(value), ''], floor: 4,
    series: [{ column: 'in_flight', kind: 'line fill' }, { column: 'queued', kind: 'wait' }],
    sub: (at, totals) => [[`${digits(at('queued'))} queued`, at('queued') > 0 ? 'strong' : ''], [totals ? ` of ${digits(totals.max_queue)} places` : '', '']],
  },
  {
    id: 'first', title: 'Time to first token', unit: seconds, floor: 0.05,
    series: [{ column: 'first_p50', kind: 'line', band: 'first_p99' }, { column: 'first_p99', kind: 'upper' }],
    sub: (at) => [['median · 99th percentile ', ''], [joined(seconds(at('first_p99'))), 'strong']],
  },
  {
    id: 'token', title: 'Time per output token', unit: seconds, floor: 0.005,
    series: [{ column: 'token_p50', kind: 'line', band: 'token_p99' }, { column: 'token_p99', kind: 'upper' }],
    sub: (at) => [['median · 99th percentile ', ''], [joined(seconds(at('token_p99'))), 'strong']],
  },
  {
    id: 'bytes', title: 'KV moved', unit: (value) => { const [number, unit] = bytes(value); return [number, unit && `${unit}/s`]; }, floor: 1000,
    series: [{ column: 'bytes_s', kind: 'line fill green' }],
    sub: (at, totals) => [[known(at('transfers')) ? many(at('transfers'), 'transfer') : `${NONE} transfers`, 'strong'], [` in flight${totals ? ` · ${joined(bytes(totals.bytes))} in all` : ''}`, '']],
  },
  {
    id: 'hits', title: 'Selection hits', unit: (value) => (known(value) ? [digits(value * 100), '%'] : [NONE, '']), floor: 1, ceiling: 1,
    series: [{ column: 'hit_rate', kind: 'line green fill' }],
    sub: () => [['of the selected rows were on the device', '']],
  },
];

// Of these, nothing is the rule, and is not drawn.
const rare = (kind) => kind.includes('bad') || kind === 'wait';

function ceilingOf(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.9999);
}

class Chart {
  constructor(how, panel) {
    this.how = how;
    this.panel = panel;
    this.value = html('p', { class: 'value' });
    this.sub = html('p', { class: 'sub' });
    this.moment = html('span', { class: 'at' });
    this.plot = svg('svg', { class: 'plot', tabindex: 0, role: 'img' });
    this.figure = html('figure', { class: 'panel card', 'data-chart': how.id },
      html('figcaption', {}, html('h2', {}, how.title, this.moment), this.value, this.sub), this.plot);
    this.plot.addEventListener('pointermove', (event) => panel.point(this, event.offsetX / this.plot.clientWidth));
    this.plot.addEventListener('pointerleave', () => panel.point(null));
    this.plot.addEventListener('blur', () => panel.point(null));
    this.plot.addEventListener('keydown', (event) => panel.key(this, event));
  }

  draw(feed, rows, from, until, cursor) {
    const { how } = this;
    const column = (name) => feed.columns[name];
    const width = Math.max(80, this.plot.clientWidth);
    const height = Math.max(60, this.plot.clientHeight);
    const at = (name) => (cursor || rows[rows.length - 1] || [])[column(name)];
    const totals = cursor ? null : feed.answer.totals;
    const [number, unit] = how.unit(at(how.series[0].column));
    this.value.replaceChildren(number, html('small', {}, unit));
    this.sub.replaceChildren(...how.sub(at, totals).map(([text, kind]) => (kind === 'strong' ? html('b', {}, text) : html('span', { class: kind || null }, text))));
    write(this.moment, cursor ? `${ago((until - cursor[0]) / 1000)} ago` : '');
    this.plot.setAttribute('aria-label', `${how.title}: ${number} ${unit}. ${this.sub.textContent}. Arrow keys move through time.`);

    const values = rows.flatMap((row) => how.series.map((each) => row[column(each.column)])).filter(known);
    const top = how.ceiling || ceilingOf(Math.max(how.floor, ...values));
    const x = (time) => ((time - from) / (until - from)) * width;
    const base = height - PLOT.bottom;
    const y = (value) => base - (Math.min(value, top) / top) * (base - PLOT.top);
    const parts = [];
    for (const share of [0, 0.5, 1]) parts.push(svg('line', { class: 'rule', x1: 0, x2: width, y1: y(top * share), y2: y(top * share) }));
    for (const time of feed.restarts) if (time > from) parts.push(svg('line', { class: 'restart', x1: x(time), x2: x(time), y1: 0, y2: base }, svg('title', {}, 'The proxy was restarted')));
    for (const each of how.series) parts.push(...this.lines(rows, each, column, x, y, base));
    const label = (value) => joined(how.unit(value));
    parts.push(svg('text', { x: 16, y: PLOT.top - 5 }, label(top)));
    parts.push(svg('text', { x: 16, y: height - 4 }, `−${ago((until - from) / 1000)}`));
    parts.push(svg('text', { x: width - 16, y: height - 4, 'text-anchor': 'end' }, 'now'));
    if (!values.length) parts.push(svg('text', { class: 'none', x: width / 2, y: base / 2 + 8 }, 'nothing yet'));
    if (cursor) {
      parts.push(svg('line', { class: 'cross', x1: x(cursor[0]), x2: x(cursor[0]), y1: 0, y2: base }));
      for (const each of how.series) {
        const value = cursor[column(each.column)];
        if (known(value) && !(value === 0 && rare(each.kind))) parts.push(svg('circle', { class: 'knob', cx: x(cursor[0]), cy: y(value), r: 3 }));
      }
    }
    this.plot.setAttribute('viewBox', `0 0 ${width} ${height}`);
    this.plot.replaceChildren(...parts);
  }

  lines(rows, series, column, x, y, base) {
    const { kind, band } = series;
    const line = [];
    const area = [];
    let run = [];
    const flush = () => {
      if (!run.length) return;
      const points = run.map(([time, value]) => `${x(time).toFixed(1)} ${y(value).toFixed(1)}`);
      line.push(`M${points.join('L')}${points.length === 1 ? 'h.01' : ''}`);
      const under = band
        ? run.map(([time, , upper]) => `${x(time).toFixed(1)} ${y(upper).toFixed(1)}`).reverse()
        : [`${x(run[run.length - 1][0]).toFixed(1)} ${base}`, `${x(run[0][0]).toFixed(1)} ${base}`];
      if (points.length > 1) area.push(`M${points.join('L')}L${under.join('L')}Z`);
      run = [];
    };
    let before = null;
    for (const row of rows) {
      const seen = row[column(series.column)];
      const value = seen === 0 && rare(kind) ? null : seen; // nothing failed, nothing waits: no line along the bottom
      if (!known(value) || (before !== null && row[0] - before > GAP_MS)) flush();
      if (known(value)) { run.push([row[0], value, band ? row[column(band)] : 0]); before = row[0]; }
    }
    flush();
    const colour = kind.includes('green') ? ' green' : kind.includes('bad') ? ' bad' : '';
    const parts = [];
    if ((kind.includes('fill') || band) && area.length) parts.push(svg('path', { class: `fill${colour}`, d: area.join('') }));
    if (line.length) parts.push(svg('path', { class: kind.replace('fill', '').trim(), d: line.join('') }));
    return parts;
  }
}

class Charts {
  constructor(root, say) {
    this.say = say;
    this.chosen = null; // seconds; until somebody chooses, as much as there is to show
    this.cursor = null; // milliseconds, or null
    this.feed = null;
    this.all = CHARTS.map((how) => new Chart(how, this));
    root.append(...this.all.map((chart) => chart.figure));
    new ResizeObserver(() => this.draw()).observe(root);
  }

  show(feed) { this.feed = feed; this.draw(); }

  get span() {
    if (this.chosen !== null) return this.chosen;
    const oldest = this.feed && this.feed.rows.length ? (performance.now() - this.feed.rows[0][0]) / 1000 : 0;
    return SPANS.find((seconds) => seconds >= oldest) || SPANS[SPANS.length - 1];
  }

  draw() {
    if (!this.feed || !this.feed.answer) return;
    const until = performance.now();
    const from = until - this.span * 1000;
    const rows = this.feed.rows.filter((row) => row[0] >= from - 5000);
    let cursor = null;
    if (this.cursor !== null && rows.length) {
      const wanted = this.cursor;
      cursor = rows.reduce((best, row) => (Math.abs(row[0] - wanted) < Math.abs(best[0] - wanted) ? row : best));
    }
    for (const chart of this.all) chart.draw(this.feed, rows, from, until, cursor);
  }

  point(chart, share) {
    this.cursor = chart ? performance.now() - (1 - share) * this.span * 1000 : null;
    this.draw();
  }

  key(chart, event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === 'Escape') { this.point(null); return; }
    if (!step || !this.feed) return;
    event.preventDefault();
    const now = performance.now();
    const near = this.cursor === null ? now : this.cursor;
    const reach = step * (this.span / 60) * 1000;
    this.cursor = Math.max(now - this.span * 1000, Math.min(now, near + reach));
    this.draw();
    this.say(`${chart.how.title}, ${chart.moment.textContent}: ${chart.value.textContent}, ${chart.sub.textContent}`);
  }
}

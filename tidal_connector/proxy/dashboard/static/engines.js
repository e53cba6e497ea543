// SPDX-License-Identifier: Apache-2.0
// The table of engines; what is in trouble comes first, until a column is chosen.

const LETTERS = { r: 'ready', s: 'starting', d: 'draining', x: 'down', u: 'not reachable', '.': 'not looked at' };

function meter(row, share) {
  if (!known(share)) return NONE;
  const bar = html('i');
  bar.style.setProperty('--share', `${Math.round(Math.max(0, Math.min(1, share)) * 100)}%`);
  return html('span', { class: share >= 0.9 ? 'meter high' : 'meter', 'data-role': row.role }, bar, html('span', {}, percent(share)));
}

function ribbon(row) {
  const states = row.states || '';
  const loads = row.loads || [];
  const cells = 60;
  const most = Math.max(4, ...loads);
  const picture = svg('svg', { class: 'ribbon', 'data-role': row.role, viewBox: `0 0 ${cells * 3} 24`, preserveAspectRatio: 'none', role: 'img' });
  picture.append(svg('rect', { class: 'base', x: 0, y: 23, width: cells * 3, height: 1 }));
  [...states].forEach((letter, index) => {
    if (letter === '.') return;
    const x = (cells - states.length + index) * 3;
    const height = letter === 'u' || letter === 'x' ? 24 : letter === 'r' ? 2 + (Math.max(0, loads[index]) / most) * 20 : 8;
    picture.append(svg('rect', { class: letter, x: x + 0.3, y: 24 - height, width: 2.4, height }));
  });
  const past = [...new Set(states)].map((letter) => LETTERS[letter]).filter(Boolean).join(', ');
  picture.setAttribute('aria-label', `In the last 15 minutes: ${past || 'nothing'}; at most ${many(Math.max(0, ...loads), 'request')} at once`);
  return picture;
}

const inEngine = (row) => (known(row.running) ? row.running + (row.waiting || 0) : row.requests || 0);
const COLUMNS = [
  { title: 'Engine', sort: (row) => row.engine },
  { title: 'Side', sort: (row) => (row.role === 'prefill' ? 0 : 1), show: (row) => html('span', { class: 'side-tag', 'data-role': row.role }, row.role) },
  {
    title: 'State', sort: (row) => TROUBLE.indexOf(row.state),
    show: (row) => html('span', { title: row.note || null }, mark(row.state), STATES[row.state] || row.state, html('span', { class: 'dim-text' }, ` ${ago(row.state_s)}`)),
  },
  { title: 'Revision', sort: (row) => row.revision || '', code: true, show: (row) => row.revision || NONE },
  { title: 'Node', sort: (row) => row.node || '', code: true, show: (row) => row.node || NONE },
  { title: 'Running', number: true, sort: inEngine, show: (row) => (known(row.running) ? digits(row.running) + (row.waiting ? ` + ${digits(row.waiting)} waiting` : '') : NONE) },
  { title: 'Transfers', number: true, sort: (row) => row.transfers ?? -1, show: (row) => digits(row.transfers) },
  { title: 'KV moved', number: true, sort: (row) => row.bytes_s ?? -1, show: (row) => { const [number, unit] = bytes(row.bytes_s); return unit ? `${number} ${unit}/s` : number; } },
  { title: 'Pool', sort: (row) => row.kv ?? -1, show: (row) => meter(row, row.kv) },
  { title: 'Slots', sort: (row) => row.slots ?? -1, show: (row) => meter(row, row.slots) },
  { title: 'Hits', number: true, sort: (row) => row.hit_rate ?? -1, show: (row) => percent(row.hit_rate) },
  { title: 'Failed', number: true, sort: (row) => row.failures || 0, show: (row) => digits(row.failures || 0) },
  { title: 'Last 15 min', show: ribbon },
];

class Engines {
  constructor(table, empty) {
    this.table = table;
    this.empty = empty;
    this.order = null; // [column, descending], or null: trouble first
    this.rows = [];
    this.heads = COLUMNS.map((column, index) => {
      const head = html('th', { scope: 'col', class: column.number ? 'num' : null });
      if (!column.sort) { head.append(column.title); return head; }
      const button = html('button', { type: 'button' }, column.title);
      button.addEventListener('click', () => this.sort(index));
      head.append(button);
      return head;
    });
    table.tHead.append(html('tr', {}, ...this.heads));
    this.kept = new Kept(table.tBodies[0], (row) => html('tr', {},
      ...COLUMNS.map((column, index) => (index ? html('td', { class: [column.number && 'num', column.code && 'code'].filter(Boolean).join(' ') || null, 'data-label': column.title })
        : html('th', { scope: 'row', title: row.engine })))));
  }

  sort(index) {
    const same = this.order && this.order[0] === index;
    this.order = same && this.order[1] ? null : [index, Boolean(same)];
    this.show(this.rows);
  }

  show(rows) {
    this.rows = rows;
    this.heads.forEach((head, index) => dress(head, { 'aria-sort': this.order && this.order[0] === index ? (this.order[1] ? 'descending' : 'ascending') : null }, []));
    const [column, down] = this.order || [2, false];
    const value = COLUMNS[column].sort;
    const sorted = [...rows].map((row, index) => [value(row), index, row]).sort(([one, i], [other, j]) => {
      const order = typeof one === 'string' ? one.localeCompare(other, 'en', { numeric: true }) : one - other;
      return (down ? -order : order) || i - j;
    });
    this.kept.update(sorted.map(([, , row]) => row), (row) => `${row.role} ${row.engine}`, (node, row) => {
      dress(node, { 'data-engine': row.engine, 'data-role': row.role, 'data-state': row.state }, []);
      [...node.cells].forEach((cell, index) => {
        const shown = index ? COLUMNS[index].show(row) : row.engine;
        if (typeof shown === 'string') write(cell, shown);
        else cell.replaceChildren(shown);
      });
    });
    this.empty.hidden = rows.length > 0;
    write(this.empty, 'No engine is known yet: none is in the registry, and none in the proxy\'s file.');
  }

  pick(row) {
    for (const node of this.kept.nodes.values()) node.classList.remove('lit');
    const node = this.kept.nodes.get(`${row.role} ${row.engine}`);
    if (!node) return;
    node.classList.add('lit');
    node.tabIndex = -1;
    node.scrollIntoView({ block: 'center', behavior: matchMedia('(prefers-reduced-motion: reduce)').matches ? 'auto' : 'smooth' });
    node.focus({ preventScroll: true });
  }
}

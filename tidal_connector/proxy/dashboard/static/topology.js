// SPDX-License-Identifier: Apache-2.0
// Prefill engines on the left, decode engines on the right; a current between two that work on requests now, as wide as
// there are requests; a broken line where a pair may not be formed.

const ROOMY = 4;            // up to so many in a column each has a card; beyond, a line
const MOST_THREADS = 64;    // idle pairs that are drawn at all
const MOST_GLINTS = 40;     // moving lines cost the operator's processor, not the proxy's
const BESIDE = 520;
const MOST_BARS = 16;       // beyond, the barred pairs are counted at their engines

class Topology {
  constructor(root, caption, onPick) {
    this.root = root;
    this.caption = caption;
    this.onPick = onPick;
    this.answer = null;
    this.picked = null;
    const tide = svg('linearGradient', { id: 'tide', gradientUnits: 'userSpaceOnUse' }, svg('stop', { offset: 0 }), svg('stop', { offset: 1 }));
    tide.firstChild.style.stopColor = 'var(--prefill)';
    tide.lastChild.style.stopColor = 'var(--decode)';
    this.tide = tide;
    const layer = () => svg('g');
    const [threads, currents, glints, bars, marks, nodes] = [layer(), layer(), layer(), layer(), layer(), layer()];
    this.sides = [0, 1].map(() => svg('text', { class: 'side' }));
    this.centre = svg('text', { class: 'fact', 'text-anchor': 'middle' });
    this.svg = svg('svg', { role: 'group', 'aria-label': 'Prefill engines, decode engines, and the requests between them' },
      svg('defs', {}, tide), threads, currents, glints, bars, marks, nodes, ...this.sides, this.centre);
    root.append(this.svg);
    const path = (name) => () => svg('path', { class: name });
    this.threads = new Kept(threads, path('thread'));
    this.currents = new Kept(currents, () => svg('path', { class: 'current' }, svg('title')));
    this.glints = new Kept(glints, path('glint'));
    this.bars = new Kept(bars, () => svg('path', { class: 'barred' }, svg('title')));
    this.marks = new Kept(marks, () => svg('g', { class: 'bar-mark' }, svg('title'), svg('circle', { r: 7.5 }), svg('path', { d: 'M-2.8-2.800l5.6 5.600M2.8-2.800l-5.6 5.6' })));
    this.nodes = new Kept(nodes, (item) => this.make(item));
    this.wide = matchMedia('(min-width: 1121px)'); // then the charts stand beside it, and are BESIDE high
    new ResizeObserver(() => this.draw()).observe(root);
  }

  show(answer) { this.answer = answer; this.draw(); }

  make(item) {
    const parts = {};
    const node = svg('g', { class: 'node', tabindex: 0, role: 'button' });
    for (const name of ['box', 'edge']) node.append(parts[name] = svg('rect', { class: name }));
    node.append(parts.mark = svg('g', { class: 'mark' }));
    for (const name of ['name', 'tag', 'fact', 'more']) node.append(parts[name] = svg('text', { class: { fact: 'fact said', more: 'fact' }[name] || name }));
    for (const name of ['kv', 'slots']) {
      node.append(parts[`${name}Text`] = svg('text', { class: 'fact' }), parts[`${name}Gauge`] = svg('rect', { class: 'gauge', rx: 2.5 }),
        parts[`${name}Level`] = svg('rect', { class: 'level', rx: 2.5 }));
    }
    node.append(parts.title = svg('title'));
    node.parts = parts;
    const key = this.key(item);
    const pick = (on) => { this.picked = on ? key : null; this.light(); };
    node.addEventListener('pointerenter', () => pick(true));
    node.addEventListener('pointerleave', () => pick(false));
    node.addEventListener('focus', () => pick(true));
    node.addEventListener('blur', () => pick(false));
    node.addEventListener('click', () => this.onPick(item));
    node.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); this.onPick(item); }
    });
    return node;
  }

  key(row) { return `${row.role} ${row.engine}`; }

  draw() {
    const { answer } = this;
    if (!answer) return;
    const width = Math.max(300, this.root.clientWidth - 36);
    const columns = ['prefill', 'decode'].map((role) => answer.engines.filter((row) => row.role === role));
    const most = Math.max(1, ...columns.map((column) => column.length));
    const roomy = most <= ROOMY && width > 560;
    const box = roomy
      ? { width: Math.min(280, width * 0.36), height: 112, gap: 18 }
      : { width: Math.min(width > 560 ? 218 : 150, width * 0.4), height: 32, gap: 7 };
    const head = 30;
    const wanted = most * (box.height + box.gap) - box.gap;
    const height = Math.max(wanted, (this.wide.matches ? BESIDE : 240) - head);
    this.places = new Map();
    columns.forEach((column, side) => {
      const free = height - column.length * box.height;
      const gap = Math.max(box.gap, Math.min(box.height * 0.9, free / (column.length + 1)));
      const tall = column.length * (box.height + gap) - gap;
      column.forEach((row, index) => {
        const y = head + (height - tall) / 2 + index * (box.height + gap);
        this.places.set(this.key(row), { x: side ? width - box.width : 0, y, side, row, ...box });
      });
    });
    this.svg.setAttribute('viewBox', `0 0 ${width} ${height + head}`);
    this.svg.setAttribute('height', height + head);
    dress(this.tide, { x1: box.width, x2: width - box.width }, []);
    this.sides.forEach((text, side) => {
      dress(text, { x: side ? width : 0, y: 12, 'text-anchor': side ? 'end' : 'start' }, []);
      write(text, `${side ? 'Decode' : 'Prefill'} · ${columns[side].length}`);
    });
    dress(this.centre, { x: width / 2, y: 12 }, []);
    this.drawNodes(roomy);
    this.drawPairs(columns);
    this.light();
  }

  drawNodes(roomy) {
    const barred = new Map();
    for (const [prefill, decode] of this.answer.barred) {
      for (const key of [`prefill ${prefill}`, `decode ${decode}`]) barred.set(key, (barred.get(key) || 0) + 1);
    }
    const crowded = this.answer.barred.length > MOST_BARS;
    this.nodes.update([...this.places.values()].map((place) => place.row), (row) => this.key(row), (node, row) => {
      const place = this.places.get(this.key(row));
      const { parts } = node;
      const right = place.x + place.width;
      const pad = 14;
      dress(node, { 'data-engine': row.engine, 'data-role': row.role, 'data-state': row.state, 'aria-label': this.spoken(row) }, []);
      dress(parts.box, { x: place.x, y: place.y, width: place.width, height: place.height, rx: roomy ? 10 : 7 }, []);
      dress(parts.edge, { x: place.side ? place.x : right - 4, y: place.y + 8, width: 4, height: place.height - 16, rx: 2 }, []);
      if (parts.drawn !== row.state) { parts.drawn = row.state; parts.mark.replaceChildren(shape(row.state)); }
      dress(parts.mark, { 'data-state': row.state, transform: `translate(${place.x + pad} ${place.y + (roomy ? 14 : 10)})` }, []);
      const load = known(row.running) ? row.running + (row.waiting || 0) : row.requests || 0;
      const note = crowded && barred.get(this.key(row)) ? `barred × ${barred.get(this.key(row))}` : '';
      const live = row.state === 'ready' || row.state === 'draining' || row.state === 'starting';
      if (roomy) this.card(parts, place, row, pad, note, live);
      else this.line(parts, place, row, pad, note, live, load);
      write(parts.title, this.spoken(row));
    });
  }

  card(parts, place, row, pad, note, live) {
    const inner = place.width - 2 * pad;
    const tag = row.revision ? fitted(row.revision, 60, 6.7) : '';
    dress(parts.name, { x: place.x + pad + 20, y: place.y + 24 }, []);
    write(parts.name, fitted(row.engine, inner - 26 - tag.length * 6.7, 7.6));
    dress(parts.tag, { x: place.x + place.width - pad, y: place.y + 24, 'text-anchor': 'end' }, []);
    write(parts.tag, tag);
    dress(parts.fact, { x: place.x + pad, y: place.y + 44 }, []);
    const work = row.state === 'ready'
      ? [known(row.running) ? `${digits(row.running)} running` : `${digits(row.requests || 0)} of this proxy`, row.waiting ? `${digits(row.waiting)} waiting` : '']
      : [STATES[row.state] || row.state, `${ago(row.state_s)}`];
    write(parts.fact, fitted([...work, note, row.node].filter(Boolean).join(' · '), inner, 6.3));
    const moved = bytes(row.bytes_s);
    dress(parts.more, { x: place.x + pad, y: place.y + 62 }, []);
    write(parts.more, fitted(live ? [
      known(row.transfers) ? many(row.transfers, 'transfer') : '', known(row.bytes_s) ? `${joined(moved)}/s` : '',
      known(row.hit_rate) ? `${percent(row.hit_rate)} hits` : '',
    ].filter(Boolean).join(' · ') : row.note || row.http || '', inner, 6.3));
    const half = known(row.slots) ? (inner - 16) / 2 : inner;
    this.gauge(parts, 'kv', place.x + pad, place.y + 98, half, row.role === 'prefill' ? 'KV blocks' : 'pool', live ? row.kv : null);
    this.gauge(parts, 'slots', place.x + pad + half + 16, place.y + 98, half, 'slots', live ? row.slots : null);
  }

  line(parts, place, row, pad, note, live, load) {
    const right = place.x + place.width - pad;
    const word = STATES[row.state] || row.state; // where there is no room for it, the shape says it
    const said = note || (row.state === 'ready' ? digits(load) : place.width > 190 ? word : '');
    write(parts.tag, '');
    dress(parts.name, { x: place.x + pad + 19, y: place.y + 20 }, []);
    write(parts.name, fitted(row.engine, place.width - 2 * pad - 24 - said.length * 6.4, 7.6));
    dress(parts.fact, { x: right, y: place.y + 20, 'text-anchor': 'end' }, []);
    write(parts.fact, said);
    write(parts.more, '');
    this.gauge(parts, 'kv', place.x + pad, place.y + 27, place.width - 2 * pad, '', live ? row.kv : null, 2.5);
    this.gauge(parts, 'slots', 0, 0, 0, '', null);
  }

  gauge(parts, name, x, y, width, word, share, thick = 5) {
    const there = known(share);
    const [text, back, level] = [parts[`${name}Text`], parts[`${name}Gauge`], parts[`${name}Level`]];
    dress(text, { x, y: y - 8 }, []);
    write(text, there && word ? `${word} ${percent(share)}` : '');
    for (const each of [back, level]) dress(each, { x, y: y - 2, height: thick, visibility: there && width ? null : 'hidden' }, []);
    dress(back, { width: Math.max(0, width) }, []);
    dress(level, { width: there ? Math.max(0, Math.min(1, share)) * width : 0, class: share >= 0.9 ? 'level high' : 'level' }, []);
  }

  spoken(row) {
    const facts = [`${row.engine}, ${row.role}, ${STATES[row.state] || row.state} for ${ago(row.state_s)}`];
    if (row.node) facts.push(`on ${row.node}`);
    if (row.revision) facts.push(`revision ${row.revision}`);
    if (known(row.running)) facts.push(`${digits(row.running)} running, ${digits(row.waiting || 0)} waiting`);
    if (known(row.kv)) facts.push(`${percent(row.kv)} of its KV in use`);
    if (row.note) facts.push(row.note);
    return facts.join(', ');
  }

  drawPairs(columns) {
    const { answer } = this;
    const flows = answer.pairs.filter(([prefill, decode]) => this.places.has(`prefill ${prefill}`) && this.places.has(`decode ${decode}`));
    const bars = answer.barred.filter(([prefill, decode]) => this.places.has(`prefill ${prefill}`) && this.places.has(`decode ${decode}`));
    const taken = new Set([...flows, ...bars].map(([prefill, decode]) => `${prefill}\n${decode}`));
    const alive = columns.map((column) => column.filter((row) => row.state === 'ready'));
    const idle = [];
    if (alive[0].length * alive[1].length <= MOST_THREADS) {
      for (const one of alive[0]) for (const other of alive[1]) if (!taken.has(`${one.engine}\n${other.engine}`)) idle.push([one.engine, other.engine]);
    }
    const drawn = bars.length > MOST_BARS ? [] : bars;
    const roads = this.roads([...flows, ...idle.map((pair) => [...pair, 0]), ...drawn.map(([one, other]) => [one, other, 0])]);
    const key = ([prefill, decode]) => `${prefill}\n${decode}`;
    const ends = (node, [prefill, decode]) => { node.ends = [`prefill ${prefill}`, `decode ${decode}`]; };
    this.threads.update(idle, key, (node, item) => { ends(node, item); dress(node, { d: roads.get(key(item)).d }, []); });
    this.currents.update(flows, key, (node, item) => {
      ends(node, item);
      const road = roads.get(key(item));
      dress(node, { d: road.d, 'stroke-width': road.width.toFixed(1), 'data-pair': `${item[0]} ${item[1]}`, 'data-requests': item[2] }, []);
      write(node.firstChild, `${item[0]} → ${item[1]}: ${many(item[2], 'request')}`);
    });
    this.glints.update(flows.slice(0, MOST_GLINTS), key, (node, item) => { ends(node, item); const road = roads.get(key(item)); dress(node, { d: road.d, 'stroke-width': Math.min(2.4, road.width * 0.5).toFixed(1) }, []); });
    const words = (item) => `${item[0]} → ${item[1]} is barred: ${item[2]}`;
    this.bars.update(drawn, key, (node, item) => { ends(node, item); dress(node, { d: roads.get(key(item)).d, 'data-pair': `${item[0]} ${item[1]}` }, []); write(node.firstChild, words(item)); });
    this.marks.update(drawn, key, (node, item) => {
      ends(node, item);
      const { middle } = roads.get(key(item));
      dress(node, { transform: `translate(${middle[0].toFixed(1)} ${middle[1].toFixed(1)})` }, []);
      write(node.firstChild, words(item));
    });
    const requests = flows.reduce((sum, [, , number]) => sum + number, 0);
    write(this.centre, requests ? `${many(requests, 'request')} on ${many(flows.length, 'pair')}` : 'no requests now');
    write(this.caption, bars.length > MOST_BARS ? `${bars.length} barred pairs are counted at their engines; the list above says why.` : '');
  }

  // Currents leave and enter an engine side by side, in the order of the engines across, so that few cross.
  roads(pairs) {
    const full = this.places.size <= 2 * ROOMY ? 30 : 15;
    const widths = pairs.map(([, , number]) => (number ? Math.min(full, full * (0.08 + 0.16 * Math.sqrt(number))) : 1));
    const ports = [new Map(), new Map()];
    pairs.forEach(([prefill, decode], index) => {
      for (const [side, own, other] of [[0, `prefill ${prefill}`, `decode ${decode}`], [1, `decode ${decode}`, `prefill ${prefill}`]]) {
        if (!ports[side].has(own)) ports[side].set(own, []);
        ports[side].get(own).push({ index, order: this.places.get(other).y });
      }
    });
    const offsets = [[], []];
    const shrink = new Array(pairs.length).fill(1);
    ports.forEach((side, number) => {
      for (const [engine, list] of side) {
        list.sort((one, other) => one.order - other.order);
        const room = this.places.get(engine).height - 10;
        const gap = Math.min(3, room / list.length / 2);
        const sum = list.reduce((total, { index }) => total + widths[index] + gap, -gap);
        const scale = Math.min(1, room / sum);
        let at = -(sum * scale) / 2;
        for (const { index } of list) {
          offsets[number][index] = at + (widths[index] * scale) / 2;
          at += (widths[index] + gap) * scale;
          shrink[index] = Math.min(shrink[index], scale);
        }
      }
    });
    return new Map(pairs.map(([prefill, decode], index) => {
      const [from, to] = [this.places.get(`prefill ${prefill}`), this.places.get(`decode ${decode}`)];
      const [x1, y1, x2, y2] = [from.x + from.width, from.y + from.height / 2 + offsets[0][index], to.x, to.y + to.height / 2 + offsets[1][index]];
      const bend = (x2 - x1) * 0.5;
      const d = `M${x1.toFixed(1)} ${y1.toFixed(1)}C${(x1 + bend).toFixed(1)} ${y1.toFixed(1)} ${(x2 - bend).toFixed(1)} ${y2.toFixed(1)} ${x2.toFixed(1)} ${y2.toFixed(1)}`;
      return [`${prefill}\n${decode}`, { d, width: Math.max(0.8, widths[index] * shrink[index]), middle: [(x1 + x2) / 2, (y1 + y2) / 2] }];
    }));
  }

  light() {
    const { picked } = this;
    this.svg.classList.toggle('dim', picked !== null);
    const near = new Set([picked]);
    for (const kept of [this.threads, this.currents, this.glints, this.bars, this.marks]) {
      for (const node of kept.nodes.values()) {
        const lit = picked !== null && node.ends.includes(picked);
        node.classList.toggle('lit', lit);
        if (lit && kept !== this.threads) node.ends.forEach((end) => near.add(end));
      }
    }
    for (const [key, node] of this.nodes.nodes) node.classList.toggle('lit', picked !== null && near.has(key));
  }
}

function fitted(text, width, each) {
  const most = Math.max(2, Math.floor(width / each));
  const letters = [...text];
  return letters.length <= most ? text : `${letters.slice(0, most - 1).join('')}…`;
}

// SPDX-License-Identifier: Apache-2.0
// Elements. Text only ever enters the page as text: nothing here, and nothing elsewhere, parses markup.

const SVG = 'http://www.w3.org/2000/svg';
const byId = (id) => document.getElementById(id);

function dress(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
  for (const child of children) if (child !== null) node.append(child);
  return node;
}
const html = (tag, attributes = {}, ...children) => dress(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => dress(document.createElementNS(SVG, tag), attributes, children);

// Writes only what differs, so that what did not change is not read out again, nor loses its selection.
function write(node, text) { if (node.textContent !== text) node.textContent = text; }

// Keeps one element for each key, so that focus, animations and transitions outlive an update.
class Kept {
  constructor(parent, make) { this.parent = parent; this.make = make; this.nodes = new Map(); }

  update(items, key, change) {
    const wanted = new Set();
    let last = null;
    for (const item of items) {
      const name = key(item);
      wanted.add(name);
      let node = this.nodes.get(name);
      if (!node) { node = this.make(item); this.nodes.set(name, node); }
      const after = last ? last.nextSibling : this.parent.firstChild;
      if (after !== node) this.parent.insertBefore(node, after);
      change(node, item);
      last = node;
    }
    for (const [name, node] of this.nodes) if (!wanted.has(name)) { node.remove(); this.nodes.delete(name); }
  }
}

// A shape for each state, in a box of 12 by 12.
const SHAPES = {
  ready: { d: 'M6 1.6a4.4 4.4 0 1 0 .01 0z', filled: true },
  starting: { d: 'M6 1.8a4.2 4.2 0 1 0 .01 0zM6 6V3.2M6 6l2 1.4', filled: false },
  draining: { d: 'M1.5 2.500h9L6 10.500z', filled: false },
  down: { d: 'M2 2h8v8H2z', filled: true },
  unreachable: { d: 'M2.2 2.200l7.6 7.600M9.8 2.200L2.2 9.8', filled: false, heavy: true },
  gone: { d: 'M6 1.8a4.2 4.2 0 1 0 .01 0z', filled: false, dashed: true },
  left: { d: 'M2 6h8', filled: false },
};
function shape(state) {
  const how = SHAPES[state] || SHAPES.left;
  return svg('path', {
    d: how.d, fill: how.filled ? 'currentColor' : 'none', stroke: 'currentColor', 'stroke-linecap': 'round',
    'stroke-linejoin': 'round', 'stroke-width': how.heavy ? 2.4 : 1.5, 'stroke-dasharray': how.dashed ? '2 2' : null,
  });
}
const mark = (state, size = 12) =>
  svg('svg', { class: 'mark', 'data-state': state, viewBox: '0 0 12 12', width: size, height: size, 'aria-hidden': 'true' }, shape(state));

const SIGNS = {
  ok: ['var(--ok)', 'M9.5 16.500l4.5 4.5 8.5-10'],
  warning: ['var(--warning-mark)', 'M16 9v8.500M16 22v.2'],
  critical: ['var(--critical-mark)', 'M11 11l10 10M21 11L11 21'],
  note: ['var(--muted)', 'M16 15v7.500M16 10v.2'],
  waiting: ['var(--muted)', 'M10 16h12'],
};
const FRAMES = {
  ok: 'M16 2a14 14 0 1 0 .01 0z', warning: 'M16 2.500L31 29H1z', critical: 'M10.2 2h11.600L30 10.200v11.600L21.8 30H10.200L2 21.800V10.200z',
  note: 'M16 2a14 14 0 1 0 .01 0z', waiting: 'M16 2a14 14 0 1 0 .01 0z',
};
function sign(level, attributes = {}) {
  const [colour, d] = SIGNS[level] || SIGNS.note;
  const icon = svg('svg', { viewBox: '0 0 32 32', 'aria-hidden': 'true', ...attributes });
  const frame = svg('path', { d: FRAMES[level] || FRAMES.note });
  const inner = svg('path', { d, fill: 'none', 'stroke-width': 3.2, 'stroke-linecap': 'round', 'stroke-linejoin': 'round' });
  frame.style.fill = colour;
  inner.style.stroke = 'var(--panel)';
  if (level === 'warning') inner.setAttribute('transform', 'translate(0 2.5)');
  icon.append(frame, inner);
  return icon;
}

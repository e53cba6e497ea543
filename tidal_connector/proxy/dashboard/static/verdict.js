// SPDX-License-Identifier: Apache-2.0
// What is wrong, before anything else: in words on the page, in the tab's title and in its icon.

const MOST_SHOWN = 8;
const ICONS = { ok: '%23009e73', warning: '%23e69f00', critical: '%23d55e00', waiting: '%23889' };
const ICON_SHAPES = {
  ok: '<circle cx="8" cy="8" r="6"/>', warning: '<path d="M8 1l7 13H1z"/>', critical: '<path d="M2 2h12v12H2z"/>', waiting: '<circle cx="8" cy="8" r="4"/>',
};

class Verdict {
  constructor(onPick) {
    this.onPick = onPick;
    this.box = byId('verdict');
    this.level = null;
    this.answer = null;
    this.all = false;
    this.lost = null;
    this.mixed = false;
    this.kept = new Kept(byId('findings'), () => html('li', {}, html('span', {}), html('div', {}, html('p', { class: 'what' }), html('p', { class: 'hint' })), html('span', { class: 'since' })));
  }

  show(answer, mixed) { this.answer = answer; this.mixed = mixed; this.draw(); }

  // The proxy's own silence is worse than anything that it last said.
  silent(since) { this.lost = since; this.draw(); }

  draw() {
    const { answer, lost } = this;
    const level = lost !== null ? 'critical' : answer ? answer.level : 'waiting';
    if (level !== this.level) {
      this.level = level;
      this.box.dataset.level = level;
      byId('sign').replaceChildren(sign(level));
      byId('icon').href = `data:image/svg+xml,<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" fill="${ICONS[level]}">${ICON_SHAPES[level]}</svg>`;
    }
    const said = answer ? answer.headline : 'Waiting for the proxy.';
    write(byId('headline'), lost !== null ? 'The proxy does not answer.' : said);
    const own = lost !== null ? [{
      level: 'critical', since_s: lost.since, key: 'lost', what: 'This page gets no answer from the proxy and goes on asking.',
      hint: answer ? 'Everything below is what it said last.' : 'Is it running, and is this the right address?',
    }] : [];
    if (this.mixed) own.push({ level: 'warning', key: 'mixed', what: 'More than one proxy answers at this address: what is shown changes between them.', hint: 'Open the page of one of them directly.' });
    const findings = [...own, ...(answer ? answer.findings : [])];
    const shown = this.all ? findings : findings.slice(0, MOST_SHOWN);
    const more = findings.length - shown.length;
    const items = more > 0 ? [...shown, { level: 'more', what: '', key: 'more' }] : shown;
    const seen = new Map();
    const key = (item) => { const name = `${item.key || ''}${item.level} ${item.engine || ''} ${item.what.slice(0, 40)}`; seen.set(name, (seen.get(name) || 0) + 1); return `${name} ${seen.get(name)}`; };
    this.kept.update(items, key, (node, item) => this.line(node, item, more));
    const worse = findings.filter((item) => item.level !== 'note').length;
    document.title = worse ? `(${worse}) ${lost !== null ? 'no answer' : level} – tidal` : answer ? 'tidal – all is well' : 'tidal';
  }

  line(node, item, more) {
    const [icon, text, since] = node.children;
    const [what, hint] = text.children;
    dress(node, { 'data-level': item.level, 'data-engine': item.engine || null }, []);
    if (item.level === 'more') {
      const button = html('button', { type: 'button' }, `Show ${more} more`);
      button.addEventListener('click', () => { this.all = true; this.draw(); });
      what.replaceChildren(button);
      return;
    }
    if (node.sign !== item.level) { node.sign = item.level; icon.replaceChildren(sign(item.level, { class: 'glyph' })); }
    if (node.said !== item.what) {
      node.said = item.what;
      what.replaceChildren(html('span', { class: 'unseen' }, `${item.level}: `), item.engine ? this.link(item) : item.what);
    }
    write(hint, item.hint || '');
    write(since, known(item.since_s) && item.since_s >= 1 ? ago(item.since_s) : '');
  }

  link(item) {
    const button = html('button', { type: 'button' }, item.what);
    button.addEventListener('click', () => this.onPick(item.engine));
    return button;
  }
}

// SPDX-License-Identifier: Apache-2.0
// Puts the parts together.

const WORDS = { live: 'live', late: 'the proxy has not looked for', lost: 'no answer for', waiting: 'connecting' };

const say = (text) => write(byId('say'), text);
const charts = new Charts(byId('charts'), say);
const engines = new Engines(byId('table'), byId('empty'));
const topology = new Topology(byId('sea'), byId('sea-caption'), (row) => engines.pick(row));
const verdict = new Verdict((name) => {
  const row = engines.rows.find((each) => each.engine === name);
  if (row) engines.pick(row);
});

for (const state of ['ready', 'starting', 'draining', 'down', 'unreachable']) byId('legend').append(html('span', {}, mark(state, 10), STATES[state]));
const spans = new Map([...SPANS].reverse().map((span) => {
  const input = html('input', { type: 'radio', name: 'span', value: span });
  input.addEventListener('change', () => { charts.chosen = span; charts.draw(); });
  byId('spans').append(html('label', {}, input, html('span', {}, `${span / 60} min`)));
  return [span, input];
}));

function heard(feed) {
  const { answer } = feed;
  verdict.show(answer, feed.mixed);
  charts.show(feed);
  spans.get(charts.span).checked = true;
  topology.show(answer);
  engines.show(answer.engines);
  const { registry, rollout } = answer;
  byId('where').replaceChildren('proxy ', html('b', {}, answer.listen), ...(registry ? [' · registry ', html('b', {}, registry.url)] : []));
  const revisions = rollout ? Object.entries(rollout.revisions).sort() : [];
  write(byId('rollout'), revisions.length ? `rollout in progress: ${revisions.map(([name, number]) => `${number} of ${name}`).join(', ')}` : '');
  const ended = Object.entries(answer.totals.outcomes).filter(([, number]) => number).map(([name, number]) => `${digits(number)} ${name.replaceAll('_', ' ')}`);
  const facts = [`up ${ago(answer.now_s)}`, `policy ${answer.policy}`, `requests since then: ${ended.join(', ') || 'none'}`, `version ${answer.version}`];
  byId('foot').replaceChildren(...facts.map((text) => html('span', {}, text)));
}

function aged(state, since) {
  const pulse = byId('pulse');
  pulse.dataset.feed = state;
  write(byId('pulse-text'), state === 'live' || state === 'waiting' || since === null ? WORDS[state].replace(' for', '') : `${WORDS[state]} ${ago(since)}`);
  document.body.classList.toggle('stale', state === 'lost' || state === 'late');
  document.body.classList.toggle('asleep', state !== 'live');
  if ((state === 'lost') !== (verdict.lost !== null) || state === 'lost') verdict.silent(state === 'lost' ? { since: since ?? 0 } : null);
  if (state === 'lost' && !document.hidden) charts.draw();
}

new Feed(heard, aged).start();

// SPDX-License-Identifier: Apache-2.0
// Numbers and states as words. Whatever is not known is a dash, never a zero.

const NONE = '–';
const STATES = {
  ready: 'ready', starting: 'starting', draining: 'draining', down: 'down',
  unreachable: 'not reachable', gone: 'vanished', left: 'left',
};
const TROUBLE = ['down', 'unreachable', 'gone', 'draining', 'starting', 'ready', 'left'];

const known = (value) => typeof value === 'number' && Number.isFinite(value);

function digits(value, most = 3) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  const after = size === 0 ? 0 : Math.max(0, Math.min(2, most - 1 - Math.floor(Math.log10(size))));
  return value.toLocaleString('en', { minimumFractionDigits: 0, maximumFractionDigits: size >= 1000 ? 0 : after });
}

function scaled(value, units, step) {
  if (!known(value)) return [NONE, ''];
  let at = 0;
  while (Math.abs(value) >= step * 0.9995 && at < units.length - 1) { value /= step; at += 1; }
  return [digits(value), units[at]];
}

const bytes = (value) => scaled(value, ['B', 'KB', 'MB', 'GB', 'TB', 'PB'], 1000);
const count = (value) => scaled(value, ['', 'k', 'M', 'G'], 1000);

function seconds(value) {
  if (!known(value)) return [NONE, ''];
  if (value < 0.9995) return [digits(value * 1000), 'ms'];
  return value < 99.5 ? [digits(value), 's'] : [digits(value / 60, 2), 'min'];
}

function ago(value) {
  if (!known(value)) return NONE;
  if (value < 100) return `${Math.floor(value)} s`;
  if (value < 6000) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} days`;
}

const percent = (value) => (known(value) ? `${digits(value * 100, value > 0.995 || value < 0.1 ? 2 : 3)} %` : NONE);
const joined = ([value, unit]) => (unit ? `${value} ${unit}` : value);
const many = (number, word) => `${digits(number)} ${word}${number === 1 ? '' : 's'}`;

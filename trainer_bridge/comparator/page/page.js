// The live page of the comparator. It reads server-sent events with fetch, which unlike EventSource can send a
// bearer token, and writes every text as text, never as markup.
'use strict';

const byId = (id) => document.getElementById(id);
const kStates = {
  loading: 'loading', unequal: 'not equal', impossible: 'impossible logprobs', waiting: 'waiting for the sides', refused: 'cannot be compared',
  comparing: 'comparing', ready: 'ready, nothing compared yet', equal: 'equal',
};
const kCharts = [
  {name: 'tokens a second', column: 1, format: count},
  {name: 'tokens that differ', column: 2, format: count},
  {name: 'KL k3', column: 5, format: real},
  {name: 'largest |Δ logprob|', column: 6, format: real},
];
const kMostSeconds = 10000;
const kMostRetryMs = 3000;
const kQuietMs = 5000;  // the server sends an event a second

const state = {seconds: [], marks: [], clockOffset: 0, range: 300, lastEvent: 0};

// Numbers as people read them; the server writes those that JSON lacks as text.
function count(value) { return Number(value).toLocaleString('en-US'); }
function real(value) {
  const number = Number(value);
  if (number === 0) return '0';
  return Number.isFinite(number) ? number.toPrecision(3) : String(number);
}
function setText(node, text) { if (node.textContent !== text) node.textContent = text; }
function clock(ms) { return new Date(ms).toLocaleTimeString('en-GB'); }
function make(tag, text, attributes = {}) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// ---- What an event changes.

function show(event) {
  state.lastEvent = performance.now();
  state.clockOffset = event.time - Date.now();
  state.marks = event.marks;
  if (event.first) state.seconds = [];
  for (const second of event.seconds) {
    const row = second.map(Number);
    const last = state.seconds[state.seconds.length - 1];
    if (last && last[0] === row[0]) state.seconds.pop();
    state.seconds.push(row);
  }
  if (state.seconds.length > kMostSeconds) state.seconds.splice(0, state.seconds.length - kMostSeconds);

  byId('content').hidden = false;
  document.body.dataset.state = event.state;
  setText(byId('state'), kStates[event.state] + (event.open > 0 ? `, ${event.open} under way` : ''));
  const total = event.total;
  const impossible = total.impossible > 0 ? `, ${count(total.impossible)} impossible` : '';
  setText(byId('verdict'),
    `${count(total.unequal + total.missing)} of ${count(total.tokens + total.missing)} tokens differ${impossible}`);
  document.title = `${count(total.unequal + total.missing)} differ · isobit`;
  const window = event.window;
  setText(byId('window'), window.sequences === 0 ? 'Send Compare or Record, or start with --shadow_fraction.' :
    `Latest ${count(window.sequences)} sequences: ${count(window.unequal)} of ${count(window.tokens)} tokens differ.`);
  setText(byId('obstacle'), event.obstacle);
  showFigures(event);
  showSide('rollout', event.sides.rollout, event.sides.rollout.tp_size, 'TP size');
  showSide('scorer', event.sides.scorer, event.sides.scorer.shards, 'shards');
  showWorst(event);
  showRecent(event.sequences);
  showRefusals(event);
  setText(byId('about'), `isobit ${event.version}, comparing since ${clock(event.time - 1000 * event.uptime)}`);
  drawSoon();
}

function showFigures(event) {
  const total = event.total;
  // Of the last ten whole seconds.
  const now = Math.floor(event.time / 1000);
  let tokens = 0;
  for (let i = state.seconds.length - 1; i >= 0 && state.seconds[i][0] >= now - 10; --i) {
    if (state.seconds[i][0] < now) tokens += state.seconds[i][1];
  }
  setText(byId('rate'), count(Math.round(tokens / 10)));
  setText(byId('sequences-total'), count(total.sequences));
  for (const name of ['kl_k1', 'kl_k2', 'kl_k3', 'max_abs_dlogp']) setText(byId(name), real(total[name]));
  setText(byId('max_ulp'), total.max_ulp === 4294967295 ? 'NaN' : count(total.max_ulp));
  setText(byId('nan'), `${count(total.impossible)}, ${count(total.nan)}, ${count(total.missing)}`);
}

function showSide(id, side, size, sizeName) {
  const article = byId(id);
  const rows = side.error !== undefined ? [['error', side.error]] : [
    ['weights', side.weights.id === '0' || side.weights.id === 0 ? 'none yet' : `version ${side.weights.id}`],
    ['digest', side.weights.digest || 'none'],
    ['fingerprint', side.fingerprint],
    ['contract', String(side.contract)],
    ['model', side.model],
    ['numerics', side.numerics.replace('NUMERICS_MODE_', '').toLowerCase()],
    [sizeName, String(size)],
  ];
  article.dataset.reachable = side.error === undefined ? 'yes' : 'no';
  const key = JSON.stringify(rows);
  if (article.dataset.key === key) return;
  article.dataset.key = key;
  article.querySelector('dl').replaceChildren(...rows.flatMap(([name, value]) => [make('dt', name), make('dd', value)]));
}

function showWorst(event) {
  const none = event.worst.length === 0;
  byId('worst-none').hidden = !none;
  byId('worst-scroll').hidden = none;
  byId('text-head').hidden = !event.has_texts;
  const key = JSON.stringify(event.worst);
  if (byId('worst').dataset.key === key) return;
  byId('worst').dataset.key = key;
  byId('worst').replaceChildren(...event.worst.map((token) => {
    const row = make('tr');
    row.append(
      make('td', token.sequence), make('td', String(token.position)), make('td', String(token.token)),
      ...(event.has_texts ? [make('td', JSON.stringify(token.text))] : []),
      make('td', `${real(token.rollout)} ${token.rollout_bits}`),
      make('td', `${real(token.scorer)} ${token.scorer_bits}`), make('td', real(token.dlogp)),
      make('td', token.ulp === 4294967295 ? 'NaN' : count(token.ulp)), make('td', String(token.version)),
      make('td', clock(token.time)));
    return row;
  }));
}

function showRecent(sequences) {
  byId('recent-none').hidden = sequences.length > 0;
  const key = JSON.stringify(sequences);
  if (byId('recent').dataset.key === key) return;
  byId('recent').dataset.key = key;
  byId('recent').replaceChildren(...sequences.slice().reverse().map((sequence) => {
    const good = sequence.unequal === 0 && sequence.impossible === 0;
    const item = make('li', undefined, {'data-equal': good ? 'yes' : 'no'});
    const counted = `${count(sequence.unequal)} of ${count(sequence.tokens)}`;
    const where = sequence.first === undefined ? '' : `, first at token ${sequence.first}`;
    const odd = sequence.impossible > 0 ? `, ${count(sequence.impossible)} impossible` : '';
    const strip = make('canvas', undefined, {role: 'img', 'aria-label': `${counted} tokens differ${where}${odd}`});
    strip.dataset.strip = sequence.strip;
    item.append(make('span', sequence.id, {class: 'id', title: sequence.id}), strip,
      make('span', counted, {class: 'count', title: `${counted} tokens differ${where}${odd}`}));
    return item;
  }));
  drawStrips();
}

function showRefusals(event) {
  byId('refusals-none').hidden = event.refused > 0;
  const key = `${event.refused} ${event.refusals.length ? event.refusals[event.refusals.length - 1].time : 0}`;
  if (byId('refusals').dataset.key === key) return;
  byId('refusals').dataset.key = key;
  byId('refusals').replaceChildren(...event.refusals.slice().reverse().map((refusal) => {
    const item = make('li');
    item.append(make('time', clock(refusal.time), {datetime: new Date(refusal.time).toISOString()}), ` ${refusal.why}`);
    return item;
  }));
}

// ---- Drawing.

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function drawStrips() {
  const colours = Array.from({length: 10}, (_, i) => colour(`--c${i}`));
  for (const canvas of document.querySelectorAll('#recent canvas')) {
    const strip = canvas.dataset.strip;
    canvas.width = Math.max(64, strip.length);
    canvas.height = 1;
    const context = canvas.getContext('2d');
    context.clearRect(0, 0, canvas.width, 1);
    for (let i = 0; i < strip.length; ++i) {
      context.fillStyle = colours[Number(strip[i])];
      context.fillRect(i, 0, 1, 1);
    }
  }
}

function makeCharts() {
  byId('charts').replaceChildren(...kCharts.map((chart) => {
    const figure = make('figure');
    const caption = make('figcaption', chart.name);
    chart.output = make('output');
    chart.canvas = make('canvas', undefined, {role: 'img', 'aria-label': chart.name, tabindex: '0'});
    caption.append(chart.output);
    figure.append(caption, chart.canvas);
    chart.canvas.addEventListener('pointermove', (event) => readPoint(chart, event.offsetX));
    chart.canvas.addEventListener('pointerleave', () => { chart.pointer = undefined; drawSoon(); });
    chart.canvas.addEventListener('keydown', (event) => {
      const step = {ArrowLeft: -4, ArrowRight: 4}[event.key];
      if (step === undefined) return;
      event.preventDefault();
      readPoint(chart, Math.min(chart.canvas.clientWidth, Math.max(0, (chart.pointer ?? chart.canvas.clientWidth) + step)));
    });
    chart.canvas.addEventListener('blur', () => { chart.pointer = undefined; drawSoon(); });
    return figure;
  }));
}

function readPoint(chart, x) { chart.pointer = x; drawSoon(); }

let drawing = false;
function drawSoon() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; draw(); });
}

function draw() {
  const end = (Date.now() + state.clockOffset) / 1000;
  const first = state.seconds.length > 0 ? state.seconds[0][0] : end - 60;
  const begin = Math.min(first - 1, end - 30);
  const start = state.range > 0 ? Math.max(begin, end - state.range) : begin;
  for (const chart of kCharts) drawChart(chart, start, end);
}

// The largest value of each column of pixels: ten thousand points take no longer to draw than a screen's width.
function drawChart(chart, start, end) {
  const canvas = chart.canvas, scale = window.devicePixelRatio || 1;
  const width = Math.max(1, Math.round(canvas.clientWidth * scale));
  const height = Math.max(1, Math.round(canvas.clientHeight * scale));
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const context = canvas.getContext('2d');
  context.clearRect(0, 0, width, height);
  const columnOf = (time) => Math.round((time - start) / (end - start) * (width - 1));

  const most = new Map();
  let largest = 0, latest;
  for (const second of state.seconds) {
    if (second[0] < start || second[0] > end) continue;
    const value = Number.isNaN(second[chart.column]) ? Infinity : Math.abs(second[chart.column]);
    const column = columnOf(second[0]);
    most.set(column, Math.max(most.get(column) ?? 0, value));
    if (Number.isFinite(value)) largest = Math.max(largest, value);
    latest = second;
  }
  context.fillStyle = colour('--soft');
  for (const mark of state.marks) {
    const column = columnOf(mark.time / 1000);
    if (column >= 0 && column < width) context.fillRect(column, 0, scale, height);
  }
  const bad = chart.column !== 1;
  const pad = 6 * scale;
  context.fillStyle = colour(bad ? '--bad' : '--ink');
  const flat = colour('--equal');
  const size = Math.max(scale, 2 * scale);
  for (const [column, value] of most) {
    const part = value === 0 || largest === 0 ? (Number.isFinite(value) ? 0 : 1) : Math.min(1, value / largest);
    const y = height - pad - part * (height - 2 * pad);
    if (bad && value === 0) {
      context.fillStyle = flat;
      context.fillRect(column, y, size, size);
      context.fillStyle = colour('--bad');
    } else {
      context.fillRect(column, y, size, height - pad - y + size);
    }
  }
  const at = chart.pointer === undefined ? latest : nearest(start + chart.pointer / Math.max(1, canvas.clientWidth) * (end - start));
  if (chart.pointer !== undefined && at) {
    context.fillStyle = colour('--text');
    context.fillRect(columnOf(at[0]), 0, scale, height);
  }
  const text = at ? `${chart.format(at[chart.column])} at ${clock(at[0] * 1000)}, largest ${chart.format(largest)}` : 'no data';
  setText(chart.output, text);
  canvas.setAttribute('aria-label', `${chart.name}: ${text}`);
}

function nearest(time) {
  let best;
  for (const second of state.seconds) {
    if (!best || Math.abs(second[0] - time) < Math.abs(best[0] - time)) best = second;
  }
  return best;
}

// ---- The connection.

function setConnection(text, stale) {
  setText(byId('connection'), text);
  document.body.dataset.stale = stale ? 'yes' : 'no';
}

function askForToken(why) {
  setConnection('signed out', true);
  byId('login').hidden = false;
  setText(byId('login-why'), why.trim());
  byId('token').focus();
}

// Reads one stream to its end. Throws when it breaks; false: the reader must sign in first.
async function readEvents() {
  const token = sessionStorage.getItem('token');
  const abort = new AbortController();
  const response = await fetch('events', {
    headers: token ? {Authorization: `Bearer ${token}`} : {}, cache: 'no-store', signal: abort.signal,
  });
  if (response.status === 401 || response.status === 403) {
    sessionStorage.removeItem('token');
    askForToken(await response.text());
    return false;
  }
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  byId('login').hidden = true;
  setConnection('live', false);
  state.lastEvent = performance.now();
  // A connection can die without a word.
  const watch = setInterval(() => { if (performance.now() - state.lastEvent > kQuietMs) abort.abort(); }, 1000);
  try {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = '';
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return true;
      text += value;
      const ends = text.lastIndexOf('\n\n');
      if (ends < 0) continue;
      for (const block of text.slice(0, ends).split('\n\n')) {
        if (block.startsWith('data: ')) show(JSON.parse(block.slice(6)));
      }
      text = text.slice(ends + 2);
    }
  } finally {
    clearInterval(watch);
  }
}

let running = false;
async function run() {
  if (running) return;
  running = true;
  let wait = 250;
  for (;;) {
    const begin = performance.now();
    try {
      if (!await readEvents()) break;
    } catch (error) {
      console.warn(error);
    }
    if (performance.now() - begin > 2000) wait = 250;
    setConnection('disconnected, trying again', true);
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(2 * wait, kMostRetryMs);
  }
  running = false;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId('theme').setAttribute('aria-pressed', String(theme === 'dark'));
  drawStrips();
  drawSoon();
}

byId('theme').addEventListener('click', () => {
  const theme = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
  localStorage.setItem('theme', theme);
  setTheme(theme);
});
byId('ranges').addEventListener('click', (event) => {
  if (event.target.dataset.seconds === undefined) return;
  for (const button of byId('ranges').children) button.setAttribute('aria-pressed', String(button === event.target));
  state.range = Number(event.target.dataset.seconds);
  drawSoon();
});
byId('login').addEventListener('submit', (event) => {
  event.preventDefault();
  sessionStorage.setItem('token', byId('token').value.trim());
  byId('token').value = '';
  run();
});
addEventListener('resize', drawSoon);
makeCharts();
setTheme(localStorage.getItem('theme') || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'));
setInterval(drawSoon, 1000);
run();

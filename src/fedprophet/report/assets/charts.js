// What charts are made of: numbers for people, elements, scales, a tooltip, and the five kinds of chart.
"use strict";

// Numbers, as the command line writes them; a unit never stands on a line of its own ------------------------------------

const UNBROKEN = "\u00a0";

const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(1)}${UNBROKEN}%`);

function size(bytes) {
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= unit) return `${(bytes / unit).toFixed(1)}${UNBROKEN}${name}`;
  }
  return `${bytes}${UNBROKEN}B`;
}

const TIME_UNITS = [[864000, 86400, "days"], [7200, 3600, "h"], [120, 60, "min"], [0, 1, "s"]];
const timeUnit = (seconds) => TIME_UNITS.find(([from]) => seconds >= from);

function duration(seconds) {
  const [, unit, name] = timeUnit(seconds);
  return seconds > 0 && seconds < 0.1 ? `${Number(seconds.toPrecision(2))}${UNBROKEN}s` : `${(seconds / unit).toFixed(1)}${UNBROKEN}${name}`;
}

const whole = (number) => number.toLocaleString("en-GB");
const number = (value) => (value == null ? "–" : value === 0 ? "0" : String(Number(value.toPrecision(3))));
const counted = (count, what) => `${whole(count)} ${what}${count === 1 ? "" : "s"}`;

// Elements: text is always set as text, never as markup --------------------------------------------------------------

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value != null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// Scales -------------------------------------------------------------------------------------------------------------

function scale([from, to], [start, end]) {
  const span = to - from || 1;
  const place = (value) => start + ((value - from) / span) * (end - start);
  place.invert = (at) => from + ((at - start) / (end - start)) * span;
  return place;
}

// At most about so many round numbers, all multiples of `least` if that is given.
function ticks(from, to, most, least = 0) {
  const rough = Math.max((to - from) / Math.max(most, 1), least, Number.MIN_VALUE);
  const power = 10 ** Math.floor(Math.log10(rough));
  const fits = (step) => step >= rough * 0.999 && (!least || Math.abs(step / least - Math.round(step / least)) < 1e-6);
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find(fits);
  const found = [];
  for (let n = Math.ceil(from / step - 1e-9); n * step <= to + step * 1e-9; n += 1) found.push(n * step + 0); // no "-0"
  return found;
}

// Texts are measured with the font they are drawn in.
const pen = document.createElement("canvas").getContext("2d");
function textWidth(text, weight = 400) {
  pen.font = `${weight} 12px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

// The middle is left out: names of runs often differ at their ends.
function shortened(text, width, weight = 400) {
  if (textWidth(text, weight) <= width) return text;
  const cut = (kept) => `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`;
  let kept = text.length - 1;
  while (kept > 1 && textWidth(cut(kept), weight) > width) kept -= 1;
  return kept > 1 ? cut(kept) : "";
}

// The tooltip: shown for the mouse, a finger or the keyboard, and spoken for the keyboard ------------------------------

const tooltip = document.getElementById("tooltip");
const spoken = document.getElementById("spoken");

function showTooltip(title, rows, x, y) {
  tooltip.replaceChildren(
    html("strong", {}, title),
    ...rows.map(({ colour, text, value }) =>
      html("div", {}, colour && html("span", { class: `swatch ${colour}` }), html("span", {}, text), html("span", {}, value))),
  );
  tooltip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const left = x + 14 + width > scrollX + document.documentElement.clientWidth - 8 ? x - width - 14 : x + 14;
  const top = y - height - 12 < scrollY + 4 ? y + 16 : y - height - 12;
  tooltip.style.left = `${Math.max(scrollX + 8, left)}px`;
  tooltip.style.top = `${top}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}

// A chart that is drawn anew has its focus given back without a word.
let focusGivenBack = false;

// Let people walk over the `count` places of a chart. `at(x, y)` is the place under a point of the drawing, or null;
// `show(place)` marks it and returns what to say: a title, rows, and where.
function walkable(drawing, count, at, show, clear) {
  let place = null;
  const view = drawing.viewBox.baseVal;
  const point = (event) => {
    const box = drawing.getBoundingClientRect();
    return [((event.clientX - box.left) * view.width) / box.width, ((event.clientY - box.top) * view.height) / box.height];
  };
  const go = (next, aloud) => {
    place = next;
    const { title, rows, x, y } = show(place);
    const box = drawing.getBoundingClientRect();
    showTooltip(title, rows, box.left + scrollX + (x * box.width) / view.width, box.top + scrollY + (y * box.height) / view.height);
    if (aloud) spoken.textContent = `${title}. ${rows.map(({ text, value }) => `${text}: ${value}`).join("; ")}`;
  };
  const leave = () => {
    place = null;
    clear();
    hideTooltip();
  };
  const moved = (event) => {
    const found = at(...point(event));
    if (found == null) leave();
    else go(found, false);
  };
  drawing.addEventListener("pointermove", moved);
  drawing.addEventListener("pointerdown", moved);
  drawing.addEventListener("pointerleave", leave);
  drawing.addEventListener("blur", leave);
  drawing.addEventListener("focus", () => drawing.matches(":focus-visible") && count && !focusGivenBack && go(0, true));
  drawing.addEventListener("keydown", (event) => {
    const current = place ?? -1;
    const steps = {
      ArrowRight: current + 1,
      ArrowLeft: current - 1,
      PageDown: current + 10,
      PageUp: current - 10,
      Home: 0,
      End: count - 1,
    };
    if (event.key === "Escape") leave();
    if (!(event.key in steps) || !count) return;
    event.preventDefault();
    go(Math.min(Math.max(steps[event.key], 0), count - 1), true);
  });
}

function canvas(width, height, key, label) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": `${label} Arrow keys read the values.`, "data-key": key });
}

const line = (x1, y1, x2, y2, kind) => svg("line", { x1, y1, x2, y2, class: kind });
const text = (x, y, content, attributes = {}) => svg("text", { x, y, ...attributes }, content);
const rect = (x, y, width, height, kind, more = {}) =>
  svg("rect", { x, y, width: Math.max(0, width), height, class: kind, ...more });

// Lines over rounds or time ------------------------------------------------------------------------------------------

// series: {run, points: [x, y][], marks: {x, y, shape}[]}; strips: {run, parts: {from, to, text}[]}
function lineChart({ key, width, label, series, strips = [], x, y, step = false, endLabels = true }) {
  const drawn = series.filter(({ points, marks = [] }) => points.length || marks.length);
  const labelled = endLabels && width > 420 && drawn.length > 1;
  const right = labelled ? Math.min(130, 10 + Math.max(...drawn.map(({ run }) => textWidth(run.short, 600)))) : 14;
  const rows = strips.length * 17;
  const area = { left: 48, right: width - right, top: 10, bottom: 236 };
  const height = area.bottom + 8 + rows + 40;
  const across = scale(x.domain, [area.left, area.right]);
  const up = scale(y.domain, [area.bottom, area.top]);
  const drawing = canvas(width, height, key, label);
  for (const tick of ticks(...y.domain, 5, y.least)) {
    drawing.append(line(area.left, up(tick), area.right, up(tick), "grid"));
    drawing.append(text(area.left - 8, up(tick) + 4, y.tick(tick), { "text-anchor": "end" }));
  }
  for (const { run, parts } of strips) {
    for (const { from } of parts.slice(1)) drawing.append(line(across(from), area.top, across(from), area.bottom, `border ${run.colour}`));
  }
  drawing.append(line(area.left, area.bottom, area.right, area.bottom, "axis"));
  drawStrips(drawing, strips, across, area.bottom + 7);
  for (const tick of ticks(...x.domain, Math.max(2, Math.floor((area.right - area.left) / 75)), x.least)) {
    drawing.append(text(across(tick), area.bottom + rows + 21, x.tick(tick), { "text-anchor": "middle" }));
  }
  drawing.append(text((area.left + area.right) / 2, height - 3, x.label, { "text-anchor": "middle" }));
  for (const { run, points, marks = [] } of drawn) {
    const group = svg("g", { class: `series ${run.colour}`, "data-run": run.label });
    if (points.length) group.append(svg("path", { class: "line", d: path(points, across, up, step), "stroke-dasharray": run.dash }));
    if (points.length === 1) group.append(svg("circle", { class: "dot", cx: across(points[0][0]), cy: up(points[0][1]), r: 4 }));
    for (const mark of marks) group.append(shape(mark.shape, across(mark.x), up(mark.y)));
    drawing.append(group);
  }
  if (labelled) drawEndLabels(drawing, drawn, up, area);
  walkLines(drawing, drawn, across, up, area, x, y, step);
  return drawing;
}

function path(points, across, up, step) {
  const [first, ...rest] = points.map(([px, py]) => [across(px).toFixed(1), up(py).toFixed(1)]);
  return `M${first.join(" ")}` + rest.map(([px, py]) => (step ? `H${px}V${py}` : `L${px} ${py}`)).join("");
}

function shape(kind, x, y) {
  if (kind === "diamond") return svg("path", { class: "dot", d: `M${x} ${y - 6}l6 6l-6 6l-6 -6z` });
  if (kind === "square") return svg("rect", { class: "ring", x: x - 4, y: y - 4, width: 8, height: 8 });
  return svg("circle", { class: kind === "ring" ? "ring" : "dot", cx: x, cy: y, r: kind === "ring" ? 3 : 4.5 });
}

function drawStrips(drawing, strips, across, top) {
  strips.forEach(({ run, parts }, row) => {
    const group = svg("g", { class: `stages ${run.colour}` });
    parts.forEach(({ from, to, text: name }, number) => {
      const [start, end, y] = [across(from), across(to), top + row * 17];
      group.append(rect(start, y, end - start, 14, number % 2 ? "strip odd" : "strip"));
      if (textWidth(name) + 4 < end - start) group.append(text((start + end) / 2, y + 11, name, { "text-anchor": "middle" }));
    });
    drawing.append(group);
  });
}

function drawEndLabels(drawing, drawn, up, area) {
  const ends = drawn.filter(({ points }) => points.length).map(({ run, points }) => ({ run, y: up(points.at(-1)[1]) }));
  ends.sort((a, b) => a.y - b.y);
  for (let n = 1; n < ends.length; n += 1) ends[n].y = Math.max(ends[n].y, ends[n - 1].y + 15);
  const over = ends.length ? ends.at(-1).y - area.bottom : 0;
  for (const { run, y } of ends) {
    const place = over > 0 ? y - over : y;
    drawing.append(text(area.right + 8, place + 4, shortened(run.short, 120, 600), { class: `run ${run.colour}` }));
  }
}

function walkLines(drawing, drawn, across, up, area, x, y, step) {
  const places = [...new Set(drawn.flatMap(({ points }) => points.map(([px]) => px)))].sort((a, b) => a - b);
  const mark = svg("g", {});
  drawing.append(mark);
  // A run that has no point here has its latest one, unless it ended before.
  const valueAt = (points, px) => (points.length && px <= points.at(-1)[0] ? points.findLast(([each]) => each <= px) : undefined);
  const nearest = (px) => places.reduce((best, each, n) => (Math.abs(across(each) - px) < Math.abs(across(places[best]) - px) ? n : best), 0);
  const at = (px, py) => (places.length && px > area.left - 20 && px < area.right + 20 && py < area.bottom + 40 ? nearest(px) : null);
  const show = (place) => {
    const px = places[place];
    const found = drawn.map(({ run, points }) => [run, valueAt(points, px)]).filter(([, point]) => point);
    mark.replaceChildren(line(across(px), area.top, across(px), area.bottom, "cross"),
      ...found.map(([run, [own, py]]) => svg("circle", { class: `dot ${run.colour}`, cx: across(step ? px : own), cy: up(py), r: 4 })));
    const rows = found.map(([run, point]) => ({ colour: run.colour, text: run.label, value: y.value(point[1], run, px) }));
    return { title: x.title(px), rows, x: across(px), y: Math.min(...found.map(([, [, py]]) => up(py))) };
  };
  walkable(drawing, places.length, at, show, () => mark.replaceChildren());
}

// Bars from left to right: rows of parts one after the other -----------------------------------------------------------

// rows: {run, name, parts: {name, value, kind}[], note, tick: {value, name}}
function rowChart({ key, width, label, rows, format, marks = [], rowHeight = 30 }) {
  const narrow = width < 560;
  const names = Math.min(narrow ? width : width / 3, 16 + Math.max(...rows.map(({ name }) => textWidth(name, 600))));
  const left = narrow ? 0 : names;
  const lead = narrow ? 18 : 0; // on a phone the name stands above its bar
  const notes = Math.max(...rows.map(({ note = "" }) => textWidth(note))) + 14;
  const room = Math.max(60, width - left - Math.min(notes, (narrow ? 0.62 : 0.45) * width));
  const most = Math.max(...rows.map(total), ...marks.map(({ value }) => value), 1e-9);
  const across = scale([0, most], [left, left + room]);
  const top = marks.length ? 20 : 4;
  const height = top + rows.length * (rowHeight + lead) + 2;
  const drawing = canvas(width, height, key, label);
  const [bars, words] = [svg("g"), svg("g")];
  const place = (number) => top + number * (rowHeight + lead) + lead;
  // A line stands beside the bars alone where it would go through the names above them.
  const stretches = narrow ? [[4, top - 3], ...rows.map((_, number) => [place(number) - 2, place(number) + rowHeight - 6])] : [[4, height]];
  const lines = marks.flatMap(({ value }) => stretches.map(([from, to]) => line(across(value), from, across(value), to, "budget")));
  drawing.append(bars, ...lines, words);
  for (const { value, name } of marks) {
    const after = across(value) + textWidth(name, 600) + 6 < width;
    words.append(text(across(value) + (after ? 6 : -6), 12, name, { class: "bold halo", "text-anchor": after ? "start" : "end" }));
  }
  rows.forEach(({ run, name, parts, note = "", tick }, number) => {
    const y = place(number);
    const group = svg("g", { class: `bar ${run ? run.colour : ""}` });
    words.append(text(0, narrow ? y - 5 : y + rowHeight / 2 + 1, shortened(name, narrow ? width : names - 8, 600), { class: "bold halo" }));
    let sum = 0;
    for (const { value, kind } of parts) {
      group.append(rect(across(sum), y, across(sum + value) - across(sum), rowHeight - 8, kind));
      sum += value;
    }
    if (tick) group.append(line(across(tick.value), y - 3, across(tick.value), y + rowHeight - 5, "budget"));
    // The note stands behind the bar, and behind a line that it would cross.
    const ends = [sum, ...(tick ? [tick.value] : []), ...marks.map(({ value }) => value)].map(across).sort((a, b) => a - b);
    const clear = (end) => !ends.some((other) => other >= end && other < end + 12 + textWidth(note));
    const end = ends.filter((each) => each >= across(sum)).find((each, n, all) => n === all.length - 1 || clear(each + 1));
    words.append(text(end + 8, y + rowHeight / 2 + 1, shortened(note, width - end - 8), { class: "halo ink" }));
    bars.append(group);
  });
  walkRows(drawing, rows, format, across, top, rowHeight + lead, lead);
  return drawing;
}

const total = ({ parts, tick }) => Math.max(parts.reduce((sum, { value }) => sum + value, 0), tick ? tick.value : 0);

function walkRows(drawing, rows, format, across, top, pitch, lead) {
  const at = (px, py) => {
    const row = Math.floor((py - top) / pitch);
    return row >= 0 && row < rows.length ? row : null;
  };
  const show = (place) => {
    const { run, name, parts, tick, detail = [] } = rows[place];
    const said = parts.map((part) => ({ text: part.name, value: format(part.value) }));
    if (tick) said.push({ text: tick.name, value: format(tick.value) });
    said.push(...detail);
    return { title: name || run.label, rows: said, x: across(total(rows[place]) / 2), y: top + place * pitch + lead };
  };
  walkable(drawing, rows.length, at, show, () => {});
}

// Columns over rounds: stacked, one drawing for a run ------------------------------------------------------------------

function columnChart({ key, width, label, run, bars, parts, last, most, unit, format, tick, axis }) {
  const area = { left: 62, right: width - 14, top: 8, bottom: 92 };
  const across = scale([1, Math.max(last + 1, 2)], [area.left, area.right]);
  const up = scale([0, most || 1], [area.bottom, area.top]);
  const drawing = canvas(width, axis ? 126 : 98, key, label);
  for (const each of ticks(0, (most || 1) / unit, 3).map((n) => n * unit)) {
    drawing.append(line(area.left, up(each), area.right, up(each), "grid"), text(area.left - 8, up(each) + 4, tick(each), { "text-anchor": "end" }));
  }
  const group = svg("g", { class: `columns ${run.colour}` });
  bars.first.forEach((first, number) => {
    const [start, end] = [across(first), across(Math.min(first + bars.every, last + 1))];
    let sum = 0;
    for (const { name, kind } of parts) {
      const value = bars.parts[name][number];
      const gap = end - start > 4 ? 1 : 0;
      group.append(rect(start, up(sum + value), end - start - gap, up(sum) - up(sum + value), kind));
      sum += value;
    }
  });
  drawing.append(group, line(area.left, area.bottom, area.right, area.bottom, "axis"));
  if (axis) {
    for (const each of ticks(1, last, Math.max(2, Math.floor((area.right - area.left) / 90)), 1)) {
      drawing.append(text(across(each), area.bottom + 16, whole(each), { "text-anchor": "middle" }));
    }
    drawing.append(text((area.left + area.right) / 2, area.bottom + 32, "round", { "text-anchor": "middle" }));
  }
  const at = (px) => {
    const place = bars.first.findLastIndex((first) => across(first) <= px);
    return place >= 0 && px <= area.right + 8 ? place : null;
  };
  const show = (place) => {
    const first = bars.first[place];
    const until = Math.min(first + bars.every - 1, last);
    const rows = parts.map(({ name, title }) => ({ text: title, value: format(bars.parts[name][place]) }));
    return { title: `${run.label}, ${roundsText(first, until)}`, rows, x: across((first + until + 1) / 2), y: area.top + 10 };
  };
  walkable(drawing, bars.first.length, at, show, () => {});
  return drawing;
}

const roundsText = (first, last) => (first === last ? `round ${whole(first)}` : `rounds ${whole(first)} to ${whole(last)}`);

// Dots on a line from 0 to 100 %, one row for each measurement ---------------------------------------------------------

// rows: {name, group, dots: {run, value, interval, shape, detail}[]}
function dotChart({ key, width, label, rows }) {
  const narrow = width < 560;
  const left = narrow ? 0 : 16 + Math.max(...rows.map(({ name }) => textWidth(name, 600)));
  const lead = narrow ? 16 : 0;
  const values = rows.flatMap(({ dots }) => dots.flatMap(({ value, interval }) => [value, ...(interval ?? [])]));
  const from = Math.min(0.9, Math.floor(Math.min(...values, 1) * 10) / 10);
  const across = scale([from, 1], [left + 12, width - 22]);
  const pitch = Math.max(26, 12 * Math.max(...rows.map(({ dots }) => dots.length)) + 10) + lead;
  const bottom = 6 + rows.length * pitch;
  const drawing = canvas(width, bottom + 24, key, label);
  for (const tick of ticks(from, 1, narrow ? 5 : 8, 0.05)) {
    drawing.append(line(across(tick), 2, across(tick), bottom, "grid"), text(across(tick), bottom + 16, `${Math.round(100 * tick)} %`, { "text-anchor": "middle" }));
  }
  const places = [];
  rows.forEach(({ name, dots }, number) => {
    const y = 6 + number * pitch + lead;
    drawing.append(text(0, narrow ? y - 2 : y + (pitch - lead) / 2 + 4, name, { class: "bold halo" }));
    dots.forEach((dot, n) => {
      const height = y + ((pitch - lead) * (n + 1)) / (dots.length + 1);
      const group = svg("g", { class: `dots ${dot.run.colour}` });
      if (dot.interval) group.append(line(across(Math.max(from, dot.interval[0])), height, across(dot.interval[1]), height, "whisker"));
      group.append(shape(dot.shape, across(dot.value), height));
      drawing.append(group);
      places.push({ ...dot, name, x: across(dot.value), y: height });
    });
  });
  const at = (px, py) => {
    if (py > bottom || !places.length) return null;
    const far = (each) => 4 * Math.abs(each.y - py) + Math.abs(each.x - px);
    return places.reduce((best, each, n) => (far(each) < far(places[best]) ? n : best), 0);
  };
  const show = (place) => {
    const { run, name, value, detail, x, y } = places[place];
    return { title: `${run.label}, ${name}`, rows: [{ colour: run.colour, text: "accuracy", value: percent(value) }, ...detail], x, y };
  };
  walkable(drawing, places.length, at, show, () => {});
  return drawing;
}

// A heat map of clients × modules ------------------------------------------------------------------------------------

function heatMap({ key, width, label, run, clients, rounds, modules }) {
  const left = 76;
  const blocks = Math.ceil((7 * clients.length) / (width - left)); // clients that do not fit go on below
  const columns = Math.ceil(clients.length / blocks);
  const cell = Math.min(44, (width - left) / columns);
  const high = Math.min(22, Math.max(14, cell));
  const blockHeight = modules * high + 32;
  const drawing = canvas(width, blocks * blockHeight - 8, key, label);
  const most = Math.max(1, ...rounds.flat());
  const place = (client, module) => {
    const block = Math.floor(client / columns);
    return [left + (client - block * columns) * cell, block * blockHeight + (modules - module) * high];
  };
  const group = svg("g", { class: `cells ${run.colour}` });
  clients.forEach((name, client) => {
    rounds[client].forEach((count, number) => {
      const [x, y] = place(client, number + 1);
      const gap = cell > 5 ? 1 : 0;
      group.append(rect(x, y, cell - gap, high - 1, count ? "fill" : "empty", count ? { opacity: (0.12 + 0.88 * (count / most)).toFixed(3) } : {}));
    });
    const every = Math.max(1, Math.ceil(30 / cell));
    const [x, y] = place(client, 1);
    if (client % every === 0 && cell * Math.min(every, columns) >= textWidth(String(name))) {
      drawing.append(text(x + cell / 2, y + high + 14, String(name), { "text-anchor": "middle" }));
    }
  });
  for (let block = 0; block < blocks; block += 1) {
    for (let module = 1; module <= modules; module += 1) {
      drawing.append(text(left - 8, place(block * columns, module)[1] + high / 2 + 4, `module ${module}`, { "text-anchor": "end" }));
    }
    drawing.append(text(left - 8, place(block * columns, 1)[1] + high + 14, "client", { "text-anchor": "end" }));
  }
  const mark = svg("g", {});
  drawing.append(group, mark);
  const at = (px, py) => {
    const block = Math.floor(py / blockHeight);
    const client = block * columns + Math.floor((px - left) / cell);
    const row = Math.floor((py - block * blockHeight) / high);
    return px >= left && client < Math.min(clients.length, (block + 1) * columns) && row >= 0 && row < modules ? client * modules + (modules - 1 - row) : null;
  };
  const show = (each) => {
    const [client, module] = [Math.floor(each / modules), (each % modules) + 1];
    const [x, y] = place(client, module);
    mark.replaceChildren(svg("rect", { x: x - 0.5, y: y - 0.5, width: cell, height: high, fill: "none", class: "chosen" }));
    const rows = [{ text: `trained module ${module}`, value: counted(rounds[client][module - 1], "round") }];
    return { title: `Client ${clients[client]}`, rows, x: x + cell, y };
  };
  walkable(drawing, clients.length * modules, at, show, () => mark.replaceChildren());
  return drawing;
}

// The report: sections made of a document, the runs' switches, light and dark, and newer documents in live mode.

const COLOURS = 6;
const DASHES = [null, "7 4", "2 4"];
const DOCUMENT = "document.json";
const POLL_SECONDS = 1.5;
const SHAPES = { personalised: "dot", uncalibrated: "ring", global: "diamond" };
const live = document.documentElement.dataset.mode === "live";
const main = document.getElementById("report");
const state = { document: null, hidden: new Set(), axis: "rounds", open: new Set(), tag: null };

// Which runs are shown -------------------------------------------------------------------------------------------------

// A run has the colour of its place among all runs, and keeps it when others are hidden.
function withColours(runs) {
  const several = (run) => runs.filter(({ method }) => method === run.method).length > 1;
  const short = (run) => (several(run) ? run.label.slice(run.method.length + 2) : run.label);
  return runs.map((run, n) => ({ ...run, short: short(run), colour: `c${n % COLOURS}`, dash: DASHES[Math.floor(n / COLOURS) % DASHES.length] }));
}

const shownRuns = () => state.document.runs.filter((run) => !state.hidden.has(run.path));

function drawToggles() {
  const bar = document.getElementById("toggles");
  const { runs } = state.document;
  bar.hidden = runs.length < 2;
  bar.replaceChildren(...runs.map((run) =>
    html("button", {
      type: "button",
      class: `toggle ${run.colour}`,
      "aria-pressed": String(!state.hidden.has(run.path)),
      "data-key": `toggle ${run.path}`,
      title: run.path,
      onclick: () => {
        if (!state.hidden.delete(run.path)) state.hidden.add(run.path);
        draw();
      },
    }, html("span", { class: "swatch" }), run.label)));
}

// Pieces of sections -----------------------------------------------------------------------------------------------------

const swatch = (run) => html("span", { class: `swatch ${run.colour}` });
const named = (run) => html("span", { class: "mark" }, state.document.runs.length > 1 && swatch(run), html("span", {}, run.label));
const lead = (...content) => html("p", { class: "lead" }, ...content);
const section = (id, title, ...content) =>
  content.flat().some(Boolean) && html("section", { id, "aria-labelledby": `${id}-title` }, html("h2", { id: `${id}-title` }, title), ...content);

function table(heads, rows, attributes = {}) {
  const cell = (tag, content, n, more = {}) => {
    const [value, extra] = Array.isArray(content) ? content : [content, {}];
    return html(tag, { ...more, ...extra, "data-label": typeof heads[n] === "string" ? heads[n] : null }, value ?? "–");
  };
  return html("div", { class: "wide" }, html("table", attributes,
    html("thead", {}, html("tr", {}, heads.map((head, n) => cell("th", head, n, { scope: "col" })))),
    html("tbody", {}, rows.map((row) => html("tr", {}, row.map((each, n) =>
      n ? cell("td", each, n) : cell("th", each, n, { scope: "row" })))))));
}

// A table of several runs has a column that names them.
const runHead = (runs) => (runs.length > 1 ? [["Run", { class: "text" }]] : []);
const runCell = (runs, run) => (runs.length > 1 ? [asText(named(run))] : []);
const asText = (content) => [content, { class: "text" }];

// A chart, its caption, and the same numbers as a table.
function figure(key, drawing, caption, heads, rows) {
  const numbers = heads && html("details", { open: state.open.has(key), "data-key": `${key} table`, ontoggle: (event) => {
    if (event.target.open) state.open.add(key);
    else state.open.delete(key);
  } }, html("summary", { "data-key": `${key} summary` }, "Numbers"), table(heads, rows));
  return html("figure", { "data-chart": key }, drawing, caption && html("figcaption", {}, caption), numbers);
}

function key(entries) {
  return html("ul", { class: "key" }, entries.map(([drawing, words]) =>
    html("li", {}, svg("svg", { viewBox: "0 0 14 14", class: "c5", "aria-hidden": "true" }, drawing), words)));
}

const square = (kind) => rect(1, 1, 12, 12, kind);
const width = (columns = 1) => {
  const whole = main.clientWidth || 640;
  const gap = 2.2 * parseFloat(getComputedStyle(document.documentElement).fontSize);
  return Math.max(280, columns === 1 || matchMedia("screen and (max-width: 46rem)").matches ? whole : (whole - gap) / 2);
};

const accuracyOf = (run, kind, attack) => run.accuracies.find((each) => each.kind === kind && each.attack === attack);
const pgdOf = (run, kind) => run.accuracies.find((each) => each.kind === kind && each.label === run.attack);
const missing = (runs, has, why) => {
  const without = runs.filter((run) => !has(run));
  if (!without.length) return null;
  return lead(runs.length > 1 ? `${without.map((run) => run.label).join("; ")}: ${why}` : why[0].toUpperCase() + why.slice(1));
};

// What was reached, in words and in figures --------------------------------------------------------------------------------

function heading(runs) {
  const methods = [...new Set(runs.map((run) => run.method))];
  const data = [...new Set(runs.map((run) => factOf(run, "Data").split(":")[0]))];
  const models = [...new Set(runs.map((run) => factOf(run, "Model").split(";")[0]))];
  const list = (names) => names.length > 3 ? `${names.length} methods` : names.join(names.length > 2 ? ", " : " and ");
  return html("div", {},
    html("h1", {}, runs.length ? `${list(methods)} on ${data.join(" and ")}` : "No run to show yet"),
    runs.length > 0 && lead(`${runs.length > 1 ? counted(runs.length, "run") : runs[0].name} · ${models.join(" and ")}`));
}

const factOf = (run, label) => run.facts.find((fact) => fact.label === label)?.text ?? "";

function inWords(run) {
  const parts = [];
  const [clean, pgd, exported] = [accuracyOf(run, "personalised", "clean"), pgdOf(run, "personalised"), pgdOf(run, "global")];
  const strong = (content) => html("strong", {}, content);
  if (clean && pgd) {
    parts.push(strong(percent(pgd.accuracy)), ` of clients’ own samples are right under attack (${pgd.label}), `, strong(percent(clean.accuracy)), " without");
    if (exported) parts.push(`; the exported model has ${percent(exported.accuracy)} and ${percent(accuracyOf(run, "global", "clean")?.accuracy)}`);
    parts.push(". ");
  } else if (run.curve.round.length) {
    parts.push(`In round ${whole(run.curve.round.at(-1))}: `, strong(percent(run.curve.adversarial.at(-1))), " under attack, ", strong(percent(run.curve.clean.at(-1))), " without. ");
  } else {
    parts.push("Nothing is measured yet. ");
  }
  if (run.memory && run.cascade) parts.push(memoryInWords(run));
  if (run.time && run.rounds) parts.push(` On simulated devices ${run.finished ? "it took" : "it has taken"} `, strong(duration(run.time.computation + run.time.access)), ".");
  return parts;
}

function memoryInWords({ memory, enforced, cascade: { whole: all } }) {
  const measured = enforced.length ? ` Measured, no client took more than ${size(peakOf(enforced))}, nor more than ${percent(closestOf(enforced))} of its limit.` : "";
  if (memory.least === all) return `Every client trains the whole model, which takes ${size(all)}.${measured}`;
  return `A client needs ${size(memory.least)}, ${percent(memory.least / all)} of what the whole model takes.${measured}`;
}

const peakOf = (enforced) => Math.max(...enforced.map(({ measured }) => measured.peak));
const closestOf = (enforced) => Math.max(...enforced.map(({ measured }) => measured.closest));

function summary(runs) {
  if (!runs.length) return null;
  const measured = runs.some((run) => run.accuracies.length);
  const badge = (run) => !run.finished && html("span", { class: "badge" }, "not finished");
  const cell = (run, kind, pgd) => {
    const found = pgd ? pgdOf(run, kind) : accuracyOf(run, kind, "clean");
    return [percent(found?.accuracy), { class: kind === "personalised" ? "strong" : null }];
  };
  const attack = [...new Set(runs.map((run) => run.attack))].length === 1 ? runs[0].attack : "PGD";
  const limited = runs.some((run) => run.enforced.length);
  const heads = ["Run", "Clean, personalised", `${attack}, personalised`, "Clean, global", `${attack}, global`, "Memory a client needs", ...(limited ? ["Memory measured, at most"] : []), "Simulated time", "Rounds"];
  const rows = runs.map((run) => [
    html("span", {}, named(run), badge(run)),
    cell(run, "personalised", false), cell(run, "personalised", true), cell(run, "global", false), cell(run, "global", true),
    run.memory ? size(run.memory.least) : "–",
    ...(limited ? [run.enforced.length ? size(peakOf(run.enforced)) : "–"] : []),
    run.time ? duration(run.time.computation + run.time.access) : "–",
    whole(run.rounds),
  ]);
  return html("div", {},
    (runs.length < 3 || !measured) && html("ul", { class: "words" }, runs.map((run) => html("li", {}, runs.length > 1 && swatch(run), runs.length > 1 && html("strong", {}, `${run.label}: `), inWords(run), badge(run)))),
    measured && section("figures", "In figures", table(heads, rows, { class: "figures" }),
      html("p", { class: "minor" }, explained(["personalised", "global"]))));
}

const explained = (kinds) => `${kinds.map((kind) => `${kind}: ${state.document.kinds[kind]}`).join("; ")}.`;

function factList(runs, part) {
  const labels = [...new Set(runs.flatMap((run) => run[part].map((fact) => fact.label)))];
  const lines = labels.map((label, n) => {
    const said = runs.map((run) => run[part].filter((fact) => fact.label === label).map((fact) => fact.text).join("; "));
    const texts = [...new Set(said)];
    const values = texts.length === 1 ? texts[0] : texts.filter(Boolean).map((words) => html("div", {},
      html("span", { class: "mark" }, runs.filter((_, n) => said[n] === words).map((run) => swatch(run))), html("span", {}, words)));
    const full = n === 0 || (n === labels.length - 1 && labels.length % 2 === 0);
    return [html("dt", {}, label), html("dd", { class: full ? "full" : null }, values)];
  });
  return html("dl", { class: "facts" }, lines);
}

// Accuracy ---------------------------------------------------------------------------------------------------------------

// Where a round is on the axis: its number, or the simulated seconds up to it.
function timeAt(run, round) {
  let [sum, found] = [0, 0];
  for (const stage of run.stages) {
    if (stage.first > round) break;
    found = sum;
    sum += stage.computation + stage.access;
  }
  return round > (run.stages.at(-1)?.last ?? 0) ? sum : found;
}

function curves(runs) {
  const timed = runs.filter((run) => run.curve.seconds);
  const byTime = state.axis === "time" && timed.length > 0;
  const used = (byTime ? timed : runs).filter((run) => run.curve.round.length);
  if (!used.length) return [lead("No round was evaluated yet.")];
  const at = (run) => (byTime ? run.curve.seconds : run.curve.round);
  const last = Math.max(...used.map((run) => (byTime ? run.time.computation + run.time.access : Math.max(run.rounds, 2))));
  const [, unit, name] = byTime ? timeUnit(last) : [0, 1, ""];
  const x = byTime
    ? { domain: [0, last], label: `simulated time, ${name}`, least: 0, tick: (value) => number(value), title: (value) => duration(value * unit) }
    : { domain: [0, last], label: "round", least: 1, tick: whole, title: (value) => `Round ${whole(value)}` };
  x.domain = [0, last / unit];
  const strips = used.filter((run) => run.stages.length > 1).slice(0, 4).map((run) => ({
    run,
    parts: run.stages.map((stage) => ({
      from: (byTime ? timeAt(run, stage.first) : stage.first - 1) / unit,
      to: (byTime ? timeAt(run, stage.last + 1) : stage.last) / unit,
      text: String(stage.module),
    })),
  }));
  const chart = (part, title, attack) => {
    const series = used.map((run) => ({
      run,
      points: at(run).map((each, n) => [each / unit, run.curve[part][n]]),
      marks: marksOf(run, part, attack, byTime, unit),
    }));
    const values = series.flatMap(({ points, marks }) => [...points, ...marks.map((mark) => [0, mark.y])].map(([, each]) => each));
    const domain = [Math.floor(Math.min(...values) * 10) / 10, Math.ceil(Math.max(...values) * 10) / 10];
    const y = { domain: domain[0] === domain[1] ? [domain[0] - 0.1, domain[1]] : domain, least: 0.01, tick: (value) => `${Math.round(100 * value)} %`, value: percent };
    const label = `${title}: personalised accuracy over ${byTime ? "simulated time" : "rounds"}. ${series.map(({ run, points }) => `${run.label} ends at ${percent(points.at(-1)?.[1])}`).join(", ")}.`;
    const heads = ["Round", ...runHead(used), "Module", title];
    const rows = used.flatMap((run) => sampled(run.curve.round.length, 24).map((n) => [whole(run.curve.round[n]), ...runCell(used, run), moduleAt(run, run.curve.round[n]), percent(run.curve[part][n])]));
    return html("div", {}, html("h3", {}, title), figure(`curve ${part}`, lineChart({ key: `curve ${part}`, width: width(2), label, series, strips, x, y }), null, heads, rows));
  };
  const attacks = [...new Set(used.map((run) => run.attack))].join(", ");
  return [
    html("div", { class: "pair" }, chart("adversarial", `Under attack (${attacks})`, true), chart("clean", "Clean", false)),
    key([
      [shape("ring", 7, 7), "the round that a stage kept"],
      ...(used.some((run) => pgdOf(run, "global")) ? [[shape("diamond", 7, 7), "the exported model on the test set, measured at the end"]] : []),
      ...(strips.length ? [[square("strip odd"), "the module in training"]] : []),
    ]),
    thinned(used),
    byTime && missing(runs, (run) => run.curve.seconds, "no simulated time, so not drawn here."),
  ];
}

function marksOf(run, part, attack, byTime, unit) {
  const place = (round) => (byTime ? run.curve.seconds[run.curve.round.indexOf(round)] : round) / unit;
  const marks = run.stages.filter((stage) => stage[part] != null && run.curve.round.includes(stage.best))
    .map((stage) => ({ x: place(stage.best), y: stage[part], shape: "ring" }));
  const exported = attack ? pgdOf(run, "global") : accuracyOf(run, "global", "clean");
  if (exported) marks.push({ x: (byTime ? run.time.computation + run.time.access : run.rounds) / unit, y: exported.accuracy, shape: "diamond" });
  return marks;
}

const moduleAt = (run, round) => run.stages.find((stage) => stage.first <= round && round <= stage.last)?.module ?? "–";
const sampled = (count, most) => {
  const every = Math.max(1, Math.ceil(count / most));
  return Array.from({ length: count }, (_, n) => n).filter((n) => n % every === 0 || n === count - 1);
};

function thinned(runs) {
  const long = runs.filter((run) => run.curve.every > 1);
  return long.length > 0 && html("p", { class: "minor" }, `Long runs are thinned. Drawn are the evaluations at which a stage begins, ends or is best, and of ${long.map((run) => `${run.label} one in ${run.curve.every} of ${whole(run.curve.measured)}`).join("; of ")}.`);
}

function accuracySection(runs) {
  const choice = runs.some((run) => run.curve.seconds) && html("div", { class: "choice", role: "group", "aria-label": "What the accuracy is drawn over" },
    [["rounds", "Rounds"], ["time", "Simulated time"]].map(([axis, words]) => html("button", {
      type: "button",
      "aria-pressed": String(state.axis === axis),
      "data-key": `axis ${axis}`,
      onclick: () => {
        state.axis = axis;
        draw();
      },
    }, words)));
  return section("accuracy", "Accuracy over rounds",
    lead("Personalised accuracy: each client’s on its own held-out samples, through all modules so far, with the attack on the image."), choice, curves(runs));
}

function endSection(runs) {
  const measured = runs.filter((run) => run.accuracies.length);
  if (!measured.length) return section("end", "Accuracy at the end", lead("A run measures its trained model when it ends: no run here has yet."));
  const pairs = new Map(measured.flatMap((run) => run.accuracies.map((each) => [`${each.label}, ${each.kind}`, each])));
  const order = Object.keys(state.document.kinds);
  const sorted = [...pairs].sort(([, a], [, b]) => order.indexOf(a.kind) - order.indexOf(b.kind));
  const rows = sorted.map(([name, { kind, label }]) => ({
    name,
    dots: measured.flatMap((run) => run.accuracies.filter((each) => each.kind === kind && each.label === label).map((each) => ({
      run,
      value: each.accuracy,
      interval: each.interval,
      shape: SHAPES[kind],
      detail: [
        ...(each.interval ? [{ text: "95 % interval", value: `${(100 * each.interval[0]).toFixed(1)} – ${percent(each.interval[1])}` }] : []),
        { text: "samples", value: whole(each.samples) },
      ],
    }))),
  }));
  const label = `Accuracy at the end: ${rows.map(({ name, dots }) => `${name}: ${dots.map(({ run, value }) => `${run.label} ${percent(value)}`).join(", ")}`).join("; ")}.`;
  const heads = ["Measured", ...runHead(measured), "Accuracy", "95 % interval", "Samples", "Precision"];
  const numbers = sorted.flatMap(([name, { kind, label: attack }]) => measured.flatMap((run) => run.accuracies.filter((each) => each.kind === kind && each.label === attack).map((each) => [
    name, ...runCell(measured, run), percent(each.accuracy), each.interval ? `${(100 * each.interval[0]).toFixed(1)} – ${percent(each.interval[1])}` : "–", whole(each.samples), each.precision ?? "–",
  ])));
  const auto = runs.some((run) => run.accuracies.some((each) => /^(autoattack|aa-fast)/.test(each.attack)));
  return section("end", "Accuracy at the end",
    lead(explained(order.filter((kind) => sorted.some(([, each]) => each.kind === kind))), " Lines are 95 % intervals. ", !auto && "AutoAttack was not measured: fedprophet evaluate RUN --attack autoattack."),
    figure("end", dotChart({ key: "end", width: width(), label, rows }), null, heads, numbers),
    missing(runs, (run) => run.accuracies.length, "not measured, as the run is not finished."));
}

// The cascade, its attack, and who trained what ------------------------------------------------------------------------------

function cascadeSection(runs) {
  const drawn = new Map();
  for (const run of runs.filter((each) => each.cascade)) {
    const same = JSON.stringify([run.cascade, run.cascading]);
    drawn.set(same, [...(drawn.get(same) ?? []), run]);
  }
  const charts = [...drawn.values()].map((group, n) => {
    const [{ cascade }] = group;
    const { modules, budget, whole: all } = cascade;
    const several = drawn.size > 1 && html("h3", {}, html("span", { class: "mark" }, group.map((run) => named(run))));
    if (!group[0].cascading) return [several, lead(`Every client trains the whole model at once, or a smaller one of its kind. The whole model takes ${size(all)}; there are no modules.`)];
    const bars = [
      { run: { colour: "" }, name: "Whole model", parts: [{ name: "memory", value: all, kind: "whole" }], note: size(all) },
      ...modules.map((module) => ({
        run: group[0],
        name: `${module.index} · ${module.layers.join(", ")}`,
        parts: [{ name: "memory", value: module.memory, kind: "fill" }],
        note: `${size(module.memory)}, ${percent(module.memory / budget)} of the budget`,
        detail: [{ text: "of the budget", value: percent(module.memory / budget) }, { text: "of the whole model", value: percent(module.memory / all) }],
      })),
    ];
    const label = `${counted(modules.length, "module")} within a budget of ${size(budget)}; the whole model takes ${size(all)}.`;
    const chart = rowChart({ key: `cascade ${n}`, width: width(), label, rows: bars, format: size, marks: [{ value: budget, name: `budget ${size(budget)}` }], rowHeight: 27 });
    const heads = ["Module", ["Layers", { class: "text" }], "Memory", "of the budget", "of the whole model"];
    const rows = modules.map((module) => [module.index, asText(module.layers.join(", ")), size(module.memory), percent(module.memory / budget), percent(module.memory / all)]);
    return [several, figure(`cascade ${n}`, chart, null, heads, rows)];
  });
  return section("cascade", "The cascade",
    runs.some((run) => run.cascade && run.cascading) && lead(`Bars are the memory that training a module takes, ${countedBy(runs)}, on one scale with the whole model. A module has to fit the budget.`),
    charts, missing(runs, (run) => run.cascade, "the modules are not known: they are written when a run begins, by newer versions, and when it ends."),
    measuredMemory(runs.filter((run) => run.enforced.length)));
}

function countedBy(runs) {
  const words = { paper: "in the paper’s model of cost", measured: "as it is predicted for the most economical plan" };
  return [...new Set(runs.filter((run) => run.cascade && run.cascading).map((run) => words[run.cascade.counted]))].join(" or ");
}

// What a training was of: the modules it began and ended with, or the model where there are none.
function trainedName({ first, last }) {
  if (first == null) return "The model, or its part";
  return first === last ? `Module ${first}` : `Modules ${first} to ${last}`;
}

// Where memory was enforced: the peaks that were measured, beside what was counted and what was allowed.
function measuredMemory(runs) {
  const charts = runs.map((run) => {
    const bars = run.enforced.flatMap((part) => [
      { run, name: trainedName(part), parts: [{ name: "measured", value: part.measured.peak, kind: "fill" }], note: `${size(part.measured.peak)} of ${size(part.measured.limit)} allowed`, detail: [{ text: "trainings", value: whole(part.trainings) }, { text: "of a limit, at most", value: percent(part.measured.closest) }] },
      ...(part.counted ? [{ run, name: "counted", parts: [{ name: "counted", value: part.counted, kind: "pale" }], note: size(part.counted) }] : []),
    ]);
    const marks = run.cascade?.budget ? [{ value: run.cascade.budget, name: `budget ${size(run.cascade.budget)}` }] : [];
    const label = `Measured memory: ${run.enforced.map((part) => `${trainedName(part)} ${size(part.measured.peak)} of ${size(part.measured.limit)} allowed`).join("; ")}.`;
    const heads = ["Trained", "Times", "Counted", "Measured peak", "Its limit", "Of a limit, at most", ["Plans", { class: "text" }]];
    const rows = run.enforced.map((part) => [
      trainedName(part), whole(part.trainings), part.counted ? size(part.counted) : "–", size(part.measured.peak), size(part.measured.limit), percent(part.measured.closest), asText(planCounts(part.measured.plans)),
    ]);
    return html("div", {}, runs.length > 1 && html("h4", {}, named(run)),
      figure(`measured ${run.path}`, rowChart({ key: `measured ${run.path}`, width: width(), label, rows: bars, format: size, marks, rowHeight: 27 }), null, heads, rows),
      html("p", { class: "minor" }, `Plans: ${planCounts(summed(run.enforced))}.`));
  });
  return charts.length > 0 && [
    html("h3", {}, "Memory that was measured"),
    lead("Memory was enforced: the most that a client’s training took at its peak, of what that client might take. Counted is what the most economical plan is predicted to need; a client that has more takes a quicker plan."),
    key([[square("fill"), "measured"], [square("pale"), "counted"]]),
    charts,
  ];
}

const planCounts = (plans) => Object.entries(plans).map(([plan, times]) => `${plan} (${counted(times, "time")})`).join("; ");

function summed(enforced) {
  const sums = {};
  for (const { measured } of enforced) for (const [plan, times] of Object.entries(measured.plans)) sums[plan] = (sums[plan] ?? 0) + times;
  return Object.fromEntries(Object.entries(sums).sort(([, a], [, b]) => b - a));
}

function perturbationSection(runs) {
  const staged = runs.filter((run) => run.stages.length);
  if (!staged.length) {
    const radius = [...new Set(runs.map((run) => factOf(run, "Attack")))].join("; ");
    const words = runs.some((run) => run.cascading) ? "No round is over yet." : `There are no stages: ${radius}, in all rounds after the warm-up.`;
    return section("attack", "The attack in training", lead(words));
  }
  const last = Math.max(2, ...staged.map((run) => run.rounds));
  const x = { domain: [0, last], label: "round", least: 1, tick: whole, title: (value) => `Round ${whole(value)}` };
  const strips = staged.filter((run) => run.stages.length > 1).slice(0, 4).map((run) => ({ run, parts: run.stages.map((stage) => ({ from: stage.first - 1, to: stage.last, text: String(stage.module) })) }));
  const chart = (part, title) => {
    const series = staged.map((run) => {
      const { round, value } = run.perturbation[part];
      const points = round.map((each, n) => [each, value[n]]);
      return { run, points: points.length ? [...points, [run.stages.at(-1).last, value.at(-1)]] : [] };
    });
    const most = Math.max(...series.flatMap(({ points }) => points.map(([, each]) => each)), 0);
    if (!most) return html("div", {}, html("h3", {}, title), lead(part === "alpha" ? "The first module is attacked at the image: alpha begins with the second." : "Not recorded."));
    const up = ticks(0, most * 1.0001, 5);
    const y = { domain: [0, Math.max(most, up.at(-1) + (up.at(-1) < most ? up[1] : 0))], tick: number, value: number };
    const label = `${title} over rounds. ${series.map(({ run, points }) => points.length ? `${run.label} ends with ${number(points.at(-1)[1])}` : "").join(" ")}`;
    return html("div", {}, html("h3", {}, title), figure(`attack ${part}`, lineChart({ key: `attack ${part}`, width: width(2), label, series, strips, x, y, step: true })));
  };
  const heads = ["Module", ...runHead(staged), "Rounds", "Warm-up", "eps", "alpha", "Kept round", "Clean", "PGD"];
  const rows = staged.flatMap((run) => run.stages.map((stage) => [
    stage.module, ...runCell(staged, run), `${whole(stage.first)} – ${whole(stage.last)}`, whole(stage.warmup), number(stage.epsilon), number(stage.alpha), stage.best == null ? "–" : whole(stage.best), percent(stage.clean), percent(stage.adversarial),
  ]));
  return section("attack", "The attack in training",
    lead("eps is the radius of the attack on what a module reads: pixels for the first one, features after it. From the second module on it is alpha times what was measured at the module before; alpha follows the accuracies."),
    html("div", { class: "pair" }, chart("epsilon", "eps"), chart("alpha", "alpha")),
    html("h3", {}, "Each stage, with eps and alpha of the round it kept"), table(heads, rows),
    missing(runs, (run) => run.stages.length, "no stages."));
}

function assignmentSection(runs) {
  const assigned = runs.filter((run) => run.assignment);
  if (!assigned.length) {
    const words = runs.some((run) => run.cascading) ? "No module was assigned yet." : "No modules were assigned: clients of these methods train the whole model, or a part of it from the image on.";
    return section("assignment", "Who trained what", lead(words));
  }
  const charts = assigned.map((run) => {
    const { clients, rounds, left_out: left, never } = run.assignment;
    const modules = rounds[0].length;
    const most = Math.max(...rounds.flat());
    const label = `${counted(clients.length, "client")} and ${counted(modules, "module")}; the most rounds that a client trained a module are ${most}.`;
    const notes = [
      left > 0 && `${counted(left, "further client")} trained and are not drawn.`,
      never > 0 && `${counted(never, "client")} never trained.`,
    ].filter(Boolean);
    const heads = ["Client", ...Array.from({ length: modules }, (_, n) => `Module ${n + 1}`)];
    const rows = clients.map((client, n) => [client, ...rounds[n]]);
    const ramp = html("li", {}, "1", svg("svg", { viewBox: "0 0 84 14", class: `ramp ${run.colour}`, "aria-hidden": "true" }, Array.from({ length: 12 }, (_, n) => rect(n * 7, 1, 7, 12, "fill", { opacity: 0.12 + 0.08 * n }))), counted(most, "round"));
    return html("div", {}, runs.length > 1 && html("h3", {}, named(run)),
      html("ul", { class: "key" }, ramp),
      figure(`heat ${run.path}`, heatMap({ key: `heat ${run.path}`, width: width(), label, run, clients, rounds, modules }), notes.join(" "), heads, rows));
  });
  return section("assignment", "Who trained what",
    lead("In how many rounds each client trained each module. A client with memory to spare trains the modules that follow the current one, too."),
    charts, missing(runs, (run) => run.assignment, "no modules were assigned."));
}

// What it cost ---------------------------------------------------------------------------------------------------------------

function timeSection(runs) {
  const timed = runs.filter((run) => run.time && run.rounds);
  if (!timed.length) return section("time", "Simulated time", lead(runs.every((run) => run.deployed) ? "The clients are real devices: there is no simulated time." : runs.some((run) => run.time) ? "No round is over yet." : "It is not known: the journal does not hold it."));
  const rows = timed.map((run) => {
    const { computation, access, communication } = run.time;
    return {
      run,
      name: run.label,
      parts: [{ name: "computation", value: computation, kind: "fill" }, { name: "data access", value: access, kind: "pale" }],
      note: `${duration(computation + access)}, ${percent(access / (computation + access || 1))} data access`,
      detail: [{ text: "communication, not in the total", value: duration(communication) }],
    };
  });
  const label = `Simulated time: ${rows.map(({ name, note }) => `${name} ${note}`).join("; ")}.`;
  const heads = ["Run", "Total", "Computation", "Data access", "Communication"];
  const numbers = timed.map((run) => [named(run), duration(run.time.computation + run.time.access), duration(run.time.computation), duration(run.time.access), duration(run.time.communication)]);
  const last = Math.max(...timed.map((run) => run.rounds));
  const bars = timed.map((run) => perRound(run.time.rounds, run.rounds));
  const most = highest(bars);
  const [, unit, name] = timeUnit(most);
  const columns = timed.map((run, n) => html("div", {}, timed.length > 1 && html("h3", {}, named(run)), figure(`time ${run.path}`, columnChart({
    key: `time ${run.path}`,
    width: width(),
    label: `${run.label}: simulated time of a round.`,
    run,
    bars: bars[n],
    parts: [{ name: "computation", title: "computation", kind: "fill" }, { name: "access", title: "data access", kind: "pale" }],
    last,
    most,
    unit,
    format: (value) => `${duration(value)} a round`,
    tick: (value) => `${number(value / unit)} ${name}`,
    axis: n === timed.length - 1,
  }))));
  const staged = timed.filter((run) => run.stages.length);
  const stages = staged.flatMap((run) => run.stages.map((stage) => [stage.module, ...runCell(staged, run), whole(stage.last - stage.first + 1), duration(stage.computation + stage.access), duration(stage.computation), duration(stage.access)]));
  return section("time", "Simulated time",
    lead("What the rounds would have taken on the devices of the fleet: a round takes as long as its slowest client. Data access is reading batches from storage and, where a task does not fit the memory, swapping."),
    key([[square("fill"), "computation"], [square("pale"), "data access"]]),
    figure("time", rowChart({ key: "time", width: width(), label, rows, format: duration }), null, heads, numbers),
    html("h3", {}, "Each round"), columns,
    meansOf(timed, (run) => run.time.rounds),
    stages.length > 0 && html("details", { open: state.open.has("stage times"), "data-key": "stage times", ontoggle: (event) => state.open[event.target.open ? "add" : "delete"]("stage times") },
      html("summary", { "data-key": "stage times summary" }, "Each stage"), table(["Module", ...runHead(staged), "Rounds", "Total", "Computation", "Data access"], stages)),
    missing(runs, (run) => run.time && run.rounds, "no simulated time: its clients are real devices, its journal does not hold it, or no round is over yet."));
}

// Columns of several rounds are drawn as their mean, so that runs can be compared.
const perRound = (bars, rounds) => ({
  ...bars,
  parts: Object.fromEntries(Object.entries(bars.parts).map(([name, values]) =>
    [name, values.map((value, n) => value / Math.min(bars.every, rounds - bars.first[n] + 1))])),
});
const highest = (all) => Math.max(...all.flatMap(({ first, parts }) => first.map((_, n) => Object.values(parts).reduce((sum, values) => sum + values[n], 0))));
const meansOf = (runs, barsOf) => {
  const many = runs.filter((run) => barsOf(run).every > 1);
  return many.length > 0 && html("p", { class: "minor" }, `A column is a mean over rounds: ${many.map((run) => `of ${run.label} over ${barsOf(run).every}`).join("; ")}.`);
};

function trafficSection(runs) {
  const wired = runs.filter((run) => run.traffic);
  const none = "Nothing was counted: only runs on Flower move bytes over a network.";
  if (!wired.length) return section("wire", "Bytes on the wire", lead(none));
  const rows = wired.map((run) => {
    const { sent, received, jfat } = run.traffic;
    return {
      run,
      name: run.label,
      parts: [{ name: "sent by the server", value: sent, kind: "fill" }, { name: "received", value: received, kind: "pale" }],
      tick: jfat ? { value: jfat, name: "jFAT’s training" } : null,
      note: size(sent + received) + (jfat ? `, ${percent((sent + received) / jfat)} of jFAT’s` : ""),
    };
  });
  const heads = ["Run", "Sent", "Received", "Total", "jFAT’s training"];
  const numbers = wired.map((run) => [named(run), size(run.traffic.sent), size(run.traffic.received), size(run.traffic.sent + run.traffic.received), size(run.traffic.jfat)]);
  const label = `Bytes on the wire: ${rows.map(({ name, note }) => `${name} ${note}`).join("; ")}.`;
  const last = Math.max(...wired.map((run) => run.rounds));
  const bars = wired.map((run) => perRound(run.traffic.rounds, run.rounds));
  const columns = wired.map((run, n) => html("div", {}, wired.length > 1 && html("h3", {}, named(run)), figure(`wire ${run.path}`, columnChart({
    key: `wire ${run.path}`,
    width: width(),
    label: `${run.label}: bytes of a round.`,
    run,
    bars: bars[n],
    parts: [{ name: "sent", title: "sent", kind: "fill" }, { name: "received", title: "received", kind: "pale" }],
    last,
    most: highest(bars),
    unit: 1,
    format: (value) => `${size(Math.round(value))} a round`,
    tick: size,
    axis: n === wired.length - 1,
  }))));
  return section("wire", "Bytes on the wire",
    lead("What the server counted in all rounds."),
    key([[square("fill"), "sent by the server"], [square("pale"), "received"], [line(7, 1, 7, 13, "budget"), "what jFAT’s training would have moved"]]),
    figure("wire", rowChart({ key: "wire", width: width(), label, rows, format: size }), null, heads, numbers),
    html("h3", {}, "Each round"), columns, meansOf(wired, (run) => run.traffic.rounds),
    missing(runs, (run) => run.traffic, none));
}

function faultsSection(runs) {
  const lost = runs.filter((run) => run.faults.times);
  if (!lost.length) return section("dropped", "Dropped updates", lead(runs.some((run) => run.rounds) ? "None: every answer that was asked for came, and could be used." : "No round is over yet."));
  const heads = [["Reason", { class: "text" }], ...runHead(lost), "Times", "Clients", "Rounds"];
  const rows = lost.flatMap((run) => run.faults.reasons.map((reason) => [
    asText(reason.text), ...runCell(lost, run), whole(reason.times), whole(reason.clients), reason.first === reason.last ? whole(reason.first) : `${whole(reason.first)} – ${whole(reason.last)}`,
  ]));
  const others = lost.filter((run) => run.faults.other).map((run) => `${run.label}: ${counted(run.faults.other, "further reason")}`);
  return section("dropped", "Dropped updates",
    lead(lost.map((run) => `${run.label}: answers of clients were missing or dropped ${counted(run.faults.times, "time")}`).join("; "), ". The rounds went on without them."),
    table(heads, rows), others.length > 0 && html("p", { class: "minor" }, `${others.join("; ")}, in the journal.`),
    missing(runs, (run) => run.faults.times, "none."));
}

function notesSection(runs) {
  const notes = [...state.document.notes, ...runs.flatMap((run) => run.notes.map((note) => (state.document.runs.length > 1 ? `${run.label}: ${note}` : note)))];
  return notes.length > 0 && section("notes", "Notes", html("ul", { class: "notes" }, notes.map((note) => html("li", {}, note))));
}

// The page -------------------------------------------------------------------------------------------------------------------

function draw() {
  const focused = document.activeElement?.dataset?.key;
  const place = scrollY;
  hideTooltip();
  const runs = shownRuns();
  const { version, runs: all } = state.document;
  drawToggles();
  const parts = [
    heading(all),
    runs.length < all.length && html("p", { class: "notice" }, `${counted(all.length - runs.length, "run")} hidden. The switches on top show ${all.length - runs.length > 1 ? "them" : "it"} again.`),
    !all.length && state.document.notes.map((note) => html("p", { class: "notice" }, note)),
    summary(runs),
    runs.length > 0 && [
      section("trained", "What was trained, and on what", factList(runs, "facts")),
      accuracySection(runs), endSection(runs), cascadeSection(runs), perturbationSection(runs), assignmentSection(runs),
      timeSection(runs), trafficSection(runs), faultsSection(runs),
      section("hardware", "Hardware and versions", factList(runs, "hardware")),
      notesSection(runs),
    ],
    html("footer", {}, `Made by fedprophet ${version} from ${all.map((run) => run.path).join(", ") || "no run"}.${live ? "" : " Nothing on this page was loaded from a network."}`),
  ];
  main.replaceChildren(...parts.flat(Infinity).filter(Boolean));
  if (scrollY !== place) scrollTo({ top: place, behavior: "instant" });
  focusGivenBack = true;
  if (focused) [...document.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused)?.focus({ preventScroll: true });
  focusGivenBack = false;
}

function take(found) {
  state.document = { ...found, runs: withColours(found.runs) };
  draw();
}

// Light and dark: as the system has it, until the switch is used.
function startTheme() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const name = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
  };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  system.addEventListener("change", name);
  name();
}

function say(state_, words) {
  const status = document.getElementById("status");
  status.hidden = false;
  if (status.textContent !== words) status.textContent = words;
  status.dataset.state = state_;
}

async function ask() {
  let answer;
  try {
    answer = await fetch(DOCUMENT, { headers: state.tag ? { "If-None-Match": state.tag } : {}, cache: "no-store" });
  } catch {
    return say("lost", "Connection lost: what is shown was the last");
  }
  if (answer.status === 503) return say("lost", (await answer.json()).error);
  if (answer.status === 200) {
    state.tag = answer.headers.get("ETag");
    take(await answer.json());
  }
  const { runs } = state.document;
  if (runs.length && runs.every((run) => run.finished)) return say("finished", "Finished");
  const round = whole(Math.max(0, ...runs.map((run) => run.rounds)));
  const stopped = runs.length && runs.every((run) => run.finished || run.working === false);
  return stopped ? say("lost", `Stopped after round ${round}`) : say("live", `Live, round ${round}`);
}

async function follow() {
  await ask();
  setTimeout(follow, 1000 * POLL_SECONDS);
}

startTheme();
take(JSON.parse(document.getElementById("document").textContent));
let drawnWidth = main.clientWidth;
new ResizeObserver(() => {
  if (main.clientWidth === drawnWidth) return;
  drawnWidth = main.clientWidth;
  draw();
}).observe(main);
if (live) follow();

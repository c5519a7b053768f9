// A run, or two side by side: curves, equal groups, fates, findings, settings.
import { html, addressOf, asText, clock, go, number, shortNumber, useLoaded, useMemo, useState, visible, Badge, Fact, Fragment, Text, Waiting } from "./lib.js";
import { source } from "./data.js";
import { Chart } from "./chart.js";

const OWN = [["score", "score"], ["response tokens", "mean_tokens"], ["seconds of a conversation", "mean_seconds"]];
const OFTEN = ["actor/entropy", "actor/grad_norm", "actor/ppo_kl", "timing_s/step", "training/rollout_probs_diff_mean"];

function points(steps, validation, value) {
  return steps.filter((step) => (step.event === "validation") === validation)
    .map((step) => [step.step, value(step)])
    .filter(([, given]) => typeof given === "number" && Number.isFinite(given));
}

function series(found, meta, value, validations = true) {
  const several = found.dirs.length > 1;
  return found.dirs.flatMap((dir, at) => [false, true].slice(0, validations ? 2 : 1).map((validation) => ({
    name: `${several ? `${meta.dirs[at]} ` : ""}${validation ? "validation" : "training"}`, dashed: validation, dir: at,
    points: points(dir.steps, validation, value),
  }))).filter((each) => each.points.length);
}

// Returns the evaluations of checkpoints: their means, and the ends of the intervals.
function evaluated(found, meta) {
  const several = found.dirs.length > 1;
  return found.dirs.flatMap((dir, at) => [["evaluation", (point) => point.avg], ["from", (point) => point.interval?.[0]], ["to", (point) => point.interval?.[1]]]
    .map(([name, value]) => ({
      name: `${several ? `${meta.dirs[at]} ` : ""}${name}`, dashed: name !== "evaluation", dir: at, apart: true,
      points: (dir.evaluations || []).map((point) => [point.step, number(value(point))]).filter(([, given]) => Number.isFinite(given)),
    }))).filter((each) => each.points.length);
}

export function RunView({ params, meta, version }) {
  const found = useLoaded(() => source.run(), [version]);
  return html`<${Waiting} value=${found}>${found?.dirs && html`<${Run} found=${found} params=${params} meta=${meta} version=${version} />`}</${Waiting}>`;
}

function Run({ found, params, meta, version }) {
  const names = useMemo(() => [...new Set(found.dirs.flatMap((dir) => dir.steps.flatMap((step) => Object.keys(step.metrics || {}))))].sort(), [found]);
  const chosen = params.metrics === undefined ? OFTEN.filter((name) => names.includes(name)) : params.metrics.split(",").filter((name) => names.includes(name));
  const [word, setWord] = useState("");
  const pick = (step, { dir, dashed, apart }) => !apart && go("step", { dir, step, validation: dashed ? 1 : undefined });
  const toggle = (name) => go("run", { ...params, metrics: (chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]).join(",") });
  const share = (step) => (step.compared_groups ? step.equal_groups / step.compared_groups : NaN);
  const charts = [...OWN.map(([title, name]) => [title, [...series(found, meta, (step) => number(step[name])), ...(name === "score" ? evaluated(found, meta) : [])]]),
    ["share of groups with equal scores", series(found, meta, share, false), [0, 1]],
    ...chosen.map((name) => [name, series(found, meta, (step) => number(step.metrics?.[name]))])];
  return html`<section>
    <${Starts} meta=${meta} />
    <div class="charts">${charts.filter(([, lines]) => lines.length).map(([title, lines, range]) => html`<${Chart} key=${title} title=${title} series=${lines} range=${range} onPick=${pick} />`)}</div>
    <${Findings} meta=${meta} version=${version} />
    ${names.length > 0 && html`<details><summary>more curves (${names.length} metrics)</summary>
      <input type="search" placeholder="part of a name" aria-label="part of a metric's name" value=${word} onInput=${(event) => setWord(event.target.value)} />
      <div class="choices">${names.filter((name) => name.includes(word)).map((name) => html`<label><input type="checkbox" checked=${chosen.includes(name)}
        onChange=${() => toggle(name)} /> ${visible(name)}</label>`)}</div></details>`}
    ${found.flips && html`<${Flips} flips=${found.flips} meta=${meta} />`}
    <div class="columns">${found.dirs.map((dir, at) => html`<div>
      ${found.dirs.length > 1 && html`<h2>${visible(meta.dirs[at])}</h2>`}
      <${Fates} dir=${dir} at=${at} /><${Steps} dir=${dir} at=${at} /></div>`)}</div>
    ${found.dirs.length > 1 ? html`<${Differences} found=${found} meta=${meta} />` : html`<${Settings} dir=${found.dirs[0]} />`}
  </section>`;
}

function Flips({ flips, meta }) {
  return html`<section><h3>rows that flipped</h3>${flips.said.map((text) => html`<p>${visible(text)}</p>`)}
    ${flips.rows.length > 0 && html`<div class="scroll"><table class="rows"><thead><tr><th>row</th><th>data</th><th>right</th><th></th></tr></thead>
      ${flips.rows.map((row) => html`<tr><td><a href=${addressOf("group", { uid: row.uid, dir: row.dirs.join(",") })}>${visible(row.uid)}</a></td>
        <td>${visible(row.data_source)}</td><td>${row.right.map(([right, of], at) => `${right} of ${of} in ${visible(meta.dirs[row.dirs[at]])}`).join(", ")}</td>
        <td><a href=${addressOf("group", { uid: row.uid, dir: row.dirs.join(",") })}>side by side</a></td></tr>`)}</table></div>`}</section>`;
}

function Starts({ meta }) {
  return html`<p class="facts">${meta.runs.map((run) => html`<${Fragment}>
    ${["name", "model", "data"].filter((name) => run[name]).map((name) => html`<${Fact} name=${name === "name" ? "run" : name}>${visible(run[name])}</${Fact}>`)}
    <${Fact} name=${meta.dirs.length > 1 ? `start in ${visible(meta.dirs[run.dir])}` : "start"}>${clock(run.began)}</${Fact}>
    ${run.resumed_from !== null && html`<${Fact} name="resumed from step">${run.resumed_from}</${Fact}>`}
    <${Fact} name="versions">${visible(Object.entries(run.versions).map(([name, value]) => `${name} ${value}`).join(", "))}</${Fact}></${Fragment}>`)}
    ${meta.runs.length === 0 && html`<span class="quiet">no run file: settings and versions are unknown</span>`}</p>`;
}

function Bars({ entries, total }) {
  return html`<table class="plain bars">${entries.map(([name, count, where]) => html`<tr><td><a href=${addressOf("table", { where })}><${Badge} text=${name} /></a></td>
    <td class="number">${shortNumber(count)}</td><td class="bar-cell"><progress max=${total} value=${count}></progress></td></tr>`)}</table>`;
}

function Fates({ dir, at }) {
  const total = Object.values(dir.fates).flatMap(Object.values).reduce((sum, count) => sum + count, 0);
  const fates = (validation) => {
    const counted = dir.fates[validation ? "validation" : "training"];
    const where = (fate) => (fate === "undone" ? "undone=true" : `fate=${fate}${counted.undone ? " undone=false" : ""}`);
    return Object.entries(counted).sort(([, one], [, other]) => other - one)
      .map(([fate, count]) => [fate, count, `${where(fate)} validation=${validation} dir=${at}`]);
  };
  return html`<${Fragment}><h3>what became of ${shortNumber(total)} conversations</h3>
    <${Bars} entries=${[...fates(false), ...fates(true)]} total=${total} />
    <h3>why they ended</h3>
    <${Bars} entries=${Object.entries(dir.stops).map(([stop, count]) => [stop, count, `stop_reason=${stop} dir=${at}`])} total=${total} /></${Fragment}>`;
}

function Steps({ dir, at }) {
  if (!dir.steps.length) return null;
  return html`<details open=${dir.steps.length <= 30}><summary>steps (${dir.steps.length})</summary><div class="scroll"><table class="rows">
    <thead><tr><th>step</th>${["conversations", "mean score", "groups", "equal", "all right", "longest"].map((name) => html`<th class="number">${name}</th>`)}<th></th></tr></thead>
    ${dir.steps.map((step) => html`<tr><td><a href=${addressOf("step", { dir: at, step: step.step, validation: step.event === "validation" ? 1 : undefined })}>${
      step.event === "validation" ? "validation " : ""}${step.step}</a></td><td class="number">${shortNumber(step.conversations)}</td><td class="number">${shortNumber(step.score, 4)}</td>
      ${["compared_groups", "equal_groups", "all_right"].map((name) => html`<td class="number">${step.compared_groups ? step[name] : "–"}</td>`)}
      <td class="number">${step.max_seconds == null ? "–" : `${step.max_seconds.toFixed(1)} s`}</td>
      <td><a href=${addressOf("table", { where: `trained_step=${step.step} validation=${step.event === "validation"} dir=${at}` })}>conversations</a></td></tr>`)}</table></div></details>`;
}

function Findings({ meta, version }) {
  const found = useLoaded(() => source.findings(), [version]);
  if (!found?.findings) return found?.said ? html`<p class="quiet">${visible(found.said)}</p>` : null;
  return html`<section><h3>findings</h3>${found.findings.length === 0 && html`<p class="quiet">nothing was found</p>`}
    ${found.findings.map((each) => html`<article class=${`finding ${each.kind}`}><header><span class=${`badge ${each.kind === "alarm" ? "bad" : ""}`}>${each.kind}</span>
      ${" "}<b>${visible(each.symptom.replaceAll("_", " "))}</b>
      ${meta.dirs.length > 1 && html` <span class="quiet">in ${visible(meta.dirs[each.dir])}</span>`}</header><p>${visible(each.said)}</p>
      ${each.remedy && html`<p class="remedy"><span class="name">what to do:</span> ${visible(each.remedy)}</p>`}
      ${each.requests.length > 0 && html`<p>${each.requests.map((id) => html`<a href=${addressOf("talk", { id })}>${visible(id)}</a> `)}</p>`}</article>`)}</section>`;
}

function Settings({ dir }) {
  return html`<${Fragment}>${(dir.settings || []).map((run) => ["settings", "tools", "interactions", "schemas", "template"].filter((name) => run[name]
    && Object.keys(run[name]).length).map((name) => html`<details><summary>${name} of ${visible(run.start)}</summary>
      <${Text} text=${name === "template" ? run[name].text || asText(run[name]) : asText(run[name])} first=${20000} /></details>`))}</${Fragment}>`;
}

function flat(value, prefix, found) {
  if (value && typeof value === "object") {
    for (const [name, inner] of Object.entries(value)) flat(inner, prefix ? `${prefix}.${name}` : name, found);
  } else found.set(prefix, JSON.stringify(value));
  return found;
}

function Differences({ found, meta }) {
  const each = found.dirs.map((dir) => flat((dir.settings || []).at(-1) || {}, "", new Map()));
  const names = [...new Set(each.flatMap((own) => [...own.keys()]))].sort().filter((name) => new Set(each.map((own) => own.get(name))).size > 1);
  return html`<details open><summary>settings that differ (${names.length})</summary><table class="plain">
    <thead><tr><th></th>${meta.dirs.map((dir) => html`<th>${visible(dir)}</th>`)}</tr></thead>
    ${names.slice(0, 500).map((name) => html`<tr><th>${visible(name)}</th>${each.map((own) => html`<td>${visible((own.get(name) ?? "–").slice(0, 300))}</td>`)}</tr>`)}</table></details>`;
}

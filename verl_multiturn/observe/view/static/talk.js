// A conversation: messages, tokens row by row, tree, reward, timeline, and the record as it is.
import { html, addressOf, go, asText, clock, number, seconds, shortId, shortNumber, useLayoutEffect, useLoaded, useMemo, visible, Badge, Copied, Fact, Fragment, Text, Waiting } from "./lib.js";
import { source } from "./data.js";
import { RoleScores } from "./roles.js";
import { quoted } from "./query.js";
import { columnsOf, ColourChoice, Legend, Tokens } from "./tokens.js";
import { Messages } from "./messages.js";
import { Tree } from "./tree.js";
import { Gantt, PARTS } from "./gantt.js";

function Parts({ found }) {
  const { record, joined, row } = found;
  const parts = joined.map((each) => {
    try { return [each.row, JSON.parse(each.parts || "{}")]; } catch { return [each.row, {}]; }
  });
  const flat = (values, before = "") => Object.entries(values || {}).flatMap(([name, value]) =>
    value && typeof value === "object" ? flat(value, `${before}${name}/`) : [[before + name, value]]);
  const entry = (name, value) => html`<tr><th>${visible(name)}</th><td class="number">${typeof value === "object" ? visible(asText(value)) : shortNumber(value, 6)}</td></tr>`;
  const sample = record.sample;
  return html`<div class="columns"><div><h3>reward</h3><table class="plain">
      ${entry("score", row.score)}
      ${Object.entries(row.roles || {}).map(([role, own]) => html`<${Fragment}>${own.score !== null && entry(`score of ${role}`, own.score)}
        ${own.advantage !== null && entry(`mean advantage of ${role}`, own.advantage)}</${Fragment}>`)}
      ${joined.map((each) => html`<${Fragment}>${joined.length > 1 && entry(`row ${each.row}: score`, each.score)}
        ${each.otc_factor !== null && entry("OTC factor", each.otc_factor)}</${Fragment}>`)}
      ${parts.flatMap(([at, values]) => flat(values).map(([name, value]) => entry(parts.length > 1 ? `row ${at}: ${name}` : name, value)))}
      ${Object.entries(record.calc_rewards).map(([name, value]) => entry(`calc_reward of ${name}`, value))}
      ${record.score !== 0 && entry("interaction's score", record.score)}
      ${row.roles ? joined.filter((each) => each.role !== null && each.group_mean !== null).map((each) => entry(`row ${each.row} (${each.role}): group's mean`, each.group_mean))
        : html`<${Fragment}>${row.group_mean !== null && entry("group's mean", row.group_mean)} ${row.group_std !== null && entry("group's std", row.group_std)}</${Fragment}>`}
    </table>${joined.length === 0 && html`<p class="quiet">no join: the trainer's side of this conversation was not recorded</p>`}</div>
    <div><h3>data row</h3><table class="plain">
      ${sample.ground_truth !== null && html`<tr><th>ground truth</th><td><${Text} text=${asText(sample.ground_truth)} first=${1000} /></td></tr>`}
      ${sample.extra_info !== null && html`<tr><th>extra info</th><td><${Text} text=${asText(sample.extra_info)} first=${1000} /></td></tr>`}
      <tr><th>tools</th><td>${visible(sample.tools.join(", ") || "none")}</td></tr>
      ${Object.keys(sample.tools_kwargs).length > 0 && html`<tr><th>tools kwargs</th><td><${Text} text=${asText(sample.tools_kwargs)} first=${1000} /></td></tr>`}
      ${sample.interaction && html`<tr><th>interaction</th><td>${visible(sample.interaction)} <${Text} text=${asText(sample.interaction_kwargs)} first=${500} /></td></tr>`}
      <tr><th>sampling</th><td><${Text} text=${asText(record.sampling)} first=${1000} /></td></tr>
    </table></div></div>`;
}

function RowTokens({ found, at, params, to }) {
  const row = found.record.rows[at];
  const joined = found.joined.find((each) => each.row === at) || null;
  const columns = useMemo(() => columnsOf(row, joined), [found, at]);
  const colour = params.colour || "source";
  const selected = params.token === undefined ? undefined : Number(params.token);
  return html`<section>
    <div class="bar"><${ColourChoice} colour=${colour} joined=${joined} onChange=${(name) => to({ colour: name })} />
      <${Legend} colour=${colour} />
      <span class="quiet">${shortNumber(row.ids.length)} tokens, ${shortNumber(row.logprobs.length)} sampled${
        joined?.role ? `, role ${visible(joined.role)}` : ""}${
        joined ? `, ${joined.validation ? "none" : shortNumber(joined.trained)} trained${joined.untrained ? ` (${joined.untrained})` : ""}` : ", no join"}${
        found.pieces ? "" : "; the tokenizer is not here, so ids stand for texts (--tokenizer DIR)"}</span></div>
    <${Tokens} columns=${columns} pieces=${found.pieces} colour=${colour} selected=${selected}
      onSelect=${(token) => go("talk", { ...params, token }, true)} />
  </section>`;
}

export function TalkView({ params, version }) {
  if (!params.id) return html`<p class="problem" role="alert">this address names no conversation; open one from the table of conversations</p>`;
  return html`<${LoadedTalk} params=${params} version=${version} />`;
}

function LoadedTalk({ params, version }) {
  const found = useLoaded(() => source.record(params.id), [params.id, version]);
  return html`<${Waiting} value=${found}>${found?.row && html`<${Talk} found=${found} params=${params} />`}</${Waiting}>`;
}

function Talk({ found, params }) {
  const { row, record } = found;
  const to = (changes) => go("talk", { ...params, ...changes });
  const rows = record ? record.rows.map((_, at) => [`row${at}`, record.rows.length > 1 ? `row ${at}` : "tokens"]) : [];
  const tabs = record ? [["messages", "messages"], ...rows, ["tree", record.session ? "session" : "turns"], ["reward", "reward and data"],
    ["time", "timeline"], ["raw", "record"]] : [];
  const tab = tabs.some(([name]) => name === params.tab) ? params.tab : "messages";
  useLayoutEffect(() => {
    const keys = (event) => {
      if (event.target.closest?.("input, select, .tokens") || event.ctrlKey || event.metaKey || event.altKey) return;
      const number = Number(event.key);
      if (number >= 1 && number <= tabs.length) to({ tab: tabs[number - 1][0], token: undefined });
    };
    addEventListener("keydown", keys);
    return () => removeEventListener("keydown", keys);
  });
  const siblings = { where: `uid=${quoted(row.uid)} dir=${row.dir}`, sort: "number" };
  return html`<article class="talk">
    <header><h2><code>${visible(row.request_id)}</code> <${Copied} text=${row.request_id} /></h2>
      <p class="facts"><${Badge} text=${row.fate} />${row.why && html`<span class="quiet">${visible(row.why)}</span>`}
        <${Fact} name="score">${row.score === null ? "none" : shortNumber(row.score, 4)}</${Fact}>
        <${RoleScores} row=${row} />
        <${Fact} name="ended"><${Badge} text=${row.stop_reason || "not yet"} /></${Fact}>
        <${Fact} name="group"><a href=${addressOf("group", { uid: row.uid, dir: row.dir })}>${visible(shortId(row.uid))}</a>, number ${row.number}</${Fact}>
        <${Fact} name=${row.validation ? "validation" : "trained in step"}>${row.trained_step === null ? "?" : html`<a href=${addressOf("step",
          { dir: row.dir, step: row.trained_step, validation: row.validation ? 1 : undefined })}>${row.trained_step}</a>`}</${Fact}>
        <${Fact} name="begun in step">${row.step}</${Fact}>
        ${row.rerolled_from && html`<${Fact} name="begun in the place of">
          <a href=${addressOf("group", { uid: row.rerolled_from, dir: row.dir })}>${visible(shortId(row.rerolled_from))}</a></${Fact}>`}
        <${Fact} name="data">${visible(row.data_source ?? "")} ${visible(row.index ?? "")}</${Fact}>
        <${Fact} name="tokens">${shortNumber(row.prompt_tokens)} of the prompt, ${shortNumber(row.response_tokens)} of the response</${Fact}>
        <${Fact} name="time">${seconds(row.seconds)}${row.seconds !== null ? ` (engine ${seconds(row.generate_s)}, tools ${seconds(row.tools_s)})` : ""}</${Fact}>
        <${Fact} name="began">${clock(row.began)}</${Fact}>
        <a href=${addressOf("table", siblings)}>siblings</a></p>
      ${record?.error && html`<p class="problem">${visible(record.error)}</p>`}
      ${record?.outages.length > 0 && html`<p class="problem">outage: ${visible(record.outages.join(", "))}</p>`}
      ${record?.differences.map((each) => html`<p class="problem">template: ${visible(each)}</p>`)}
      ${!record && html`<p class="problem">There is no record of this conversation: ${row.fate === "open" ? "it has not ended."
        : "it was not kept, was cancelled or raised, or cannot be read."}</p>`}
    </header>
    ${record && html`<div class="tabs" role="tablist">${tabs.map(([name, title], at) => html`<button role="tab" aria-selected=${tab === name}
      title=${`key ${at + 1}`} onClick=${() => to({ tab: name, token: undefined })}>${title}</button>`)}</div>
    <div role="tabpanel">
      ${tab === "messages" && html`<${Messages} record=${record} />`}
      ${tab.startsWith("row") && html`<${RowTokens} key=${tab} found=${found} at=${Number(tab.slice(3))} params=${{ ...params, tab }} to=${to} />`}
      ${tab === "tree" && html`<${Tree} record=${record} onRow=${(at, token) => to({ tab: `row${at}`, token })} />`}
      ${tab === "reward" && html`<${Parts} found=${found} />`}
      ${tab === "time" && html`<${Own} record=${record} />`}
      ${tab === "raw" && html`<${Text} text=${JSON.stringify({ ...record, joined: found.joined }, null, 1)} first=${20000} />`}
    </div>`}
  </article>`;
}

function Own({ record }) {
  const spans = record.timeline;
  if (!spans.length) return html`<p class="quiet">no timeline was recorded</p>`;
  const ended = Math.max(record.ended, ...spans.map((span) => span.end));
  const lanes = spans.map((span) => ({ request_id: record.request_id, name: `${span.kind}${span.name ? ` ${span.name}` : ""}`,
    spans: [[span.kind, span.name, span.turn, span.start, span.end]] }));
  return html`<div><${Gantt} lanes=${lanes} began=${record.began} ended=${ended} />
    <table class="plain"><thead><tr><th>what</th><th class="number">turn</th><th class="number">after</th><th class="number">took</th></tr></thead>${spans.map((span) => html`<tr>
      <td><span class=${`dot ${PARTS[span.kind] || "other"}`}></span>${visible(span.kind)} ${visible(span.name)}</td><td class="number">${span.turn ?? ""}</td>
      <td class="number">${seconds(number(span.start) - record.began)}</td><td class="number">${seconds(span.end - span.start)}</td></tr>`)}</table></div>`;
}

// The table of conversations: filter, order and page stand in the address.
import { html, go, addressOf, useLayoutEffect, useLoaded, useRef, useState, shortNumber, seconds, clock, visible, Badge, Id, Waiting } from "./lib.js";
import { source } from "./data.js";

const LIMIT = 50;
const SHOWN = ["trained_step", "uid", "number", "score", "question", "answer", "fate", "stop_reason", "turns", "calls",
  "failed_calls", "response_tokens", "seconds", "data_source", "index", "step", "request_id"];
const SECONDS = new Set(["seconds", "generate_s", "tools_s", "interaction_s"]);
const IDS = new Set(["request_id", "uid", "rerolled_from"]);

export function cell(name, value) {
  if (value === null || value === undefined) return "";
  if (name === "fate" || name === "stop_reason") return html`<${Badge} text=${value} />`;
  if (SECONDS.has(name)) return seconds(value);
  if (name === "began" || name === "ended") return clock(value);
  if (IDS.has(name)) return html`<${Id} id=${value} />`;
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") return shortNumber(value);
  const text = visible(value);
  return text.length > 60 ? `${text.slice(0, 59)}…` : text;
}

export function TableView({ params, meta, version }) {
  const { where = "", sort = "began", desc = "0", offset = "0", columns } = params;
  const { excerpts } = meta; // they stand in the records, so that nothing is filtered or sorted by them
  const all = [...excerpts, ...Object.keys(meta.columns)];
  const shown = columns ? columns.split(",").filter((name) => all.includes(name)) : SHOWN;
  const [draft, setDraft] = useState(where);
  const body = useRef(null);
  useLayoutEffect(() => setDraft(where), [where]);
  const asked = { where, sort, desc, offset, limit: LIMIT };
  const found = useLoaded(() => source.table(asked), [asked, version]);
  const to = (changes) => go("table", { where, sort, desc, offset, columns, ...changes });
  const sorted = (name) => to({ sort: name, desc: sort === name && desc === "0" ? "1" : "0", offset: 0 });
  const open = (row) => go("talk", { id: row.request_id });
  const move = (event, row) => {
    if (event.key === "Enter") return open(row);
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (!next) return undefined;
    event.preventDefault();
    return event.currentTarget[next]?.focus();
  };
  const start = Number(offset);
  return html`<section>
    <form class="bar" onSubmit=${(event) => { event.preventDefault(); to({ where: draft, offset: 0 }); }}>
      <input id="filter" type="search" value=${draft} size="60" spellcheck="false" aria-label="filter"
        placeholder='filter, such as  score<1 trained_step>=3 stop_reason=length  or a word'
        onInput=${(event) => setDraft(event.target.value)} />
      <button>filter</button>
      ${["fate=trained score<1", "failed_calls>0", "validation=true", "fate=raised,lost,untrained"].map((each) =>
        html`<a class="hint" href=${addressOf("table", { where: each, sort, desc, columns })}>${each}</a>`)}
    </form>
    <${Waiting} value=${found}>
      <div class="bar"><span id="total">${shortNumber(found?.total)} conversations</span>
        ${found?.total > 0 && html`<span class="quiet">${shortNumber(start + 1)}–${shortNumber(Math.min(found.total, start + LIMIT))}</span>`}
        <button disabled=${start === 0} onClick=${() => to({ offset: Math.max(0, start - LIMIT) })}>previous</button>
        <button disabled=${start + LIMIT >= found?.total} onClick=${() => to({ offset: start + LIMIT })}>next</button>
        <details class="choose"><summary>columns</summary><div>${all.map((name) => html`<label>
          <input type="checkbox" checked=${shown.includes(name)} onChange=${() => to({ columns: (shown.includes(name)
            ? shown.filter((each) => each !== name) : [...shown, name]).join(",") })} /> ${name}</label>`)}</div></details>
      </div>
      <div class="scroll"><table class="rows"><thead><tr>${shown.map((name) => excerpts.includes(name) ? html`<th>${name}</th>` : html`<th class=${meta.columns[name] === "number"
        ? "number" : ""} aria-sort=${sort === name ? (desc === "1" ? "descending" : "ascending") : "none"}><button onClick=${() => sorted(name)}>${name.replaceAll("_", " ")}${
        sort === name ? (desc === "1" ? " ↓" : " ↑") : ""}</button></th>`)}</tr></thead>
      <tbody ref=${body}>${(found?.rows || []).map((row) => html`<tr key=${row.request_id} tabindex="0" onClick=${() => open(row)}
        onKeyDown=${(event) => move(event, row)}>${shown.map((name) => html`<td class=${meta.columns[name] === "number"
          ? "number" : excerpts.includes(name) ? "excerpt" : ""} title=${excerpts.includes(name) ? visible(row[name]) : undefined}>${cell(name, row[name])}</td>`)}</tr>`)}</tbody></table></div>
    </${Waiting}>
  </section>`;
}

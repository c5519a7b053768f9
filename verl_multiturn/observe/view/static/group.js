// A group: what its siblings have in common, and each from the first differing token on. Of several folders (`dir=0,1`)
// side by side: two evaluations name the group of a row alike.
import { html, addressOf, asText, go, shortNumber, useLoaded, useMemo, visible, number, Badge, Copied, Fact, Text, Waiting } from "./lib.js";
import { source } from "./data.js";
import { Content } from "./messages.js";
import { quoted } from "./query.js";
import { haveSignal, meanStd, rolesOf, RoleFigures, RoleScores } from "./roles.js";
import { columnsOf, ColourChoice, Legend, Tokens, textOf } from "./tokens.js";

const MOST = 64;

async function load(uid, dir) {
  const { rows, total } = await source.table({ where: `uid=${quoted(uid)} dir=${dir}`, sort: "number", limit: MOST });
  const talks = [];
  for (const row of rows) talks.push(await source.record(row.request_id));
  return { total, talks };
}

// Returns the number of tokens that all first rows begin with.
export function commonLength(lists) {
  if (lists.length < 2) return 0;
  let at = 0;
  while (lists.every((ids) => at < ids.length && ids[at] === lists[0][at])) at++;
  return at;
}

export function GroupView({ params, meta, version }) {
  if (!params.uid) return html`<p class="problem" role="alert">this address names no group; open one from the table of conversations</p>`;
  return html`<${LoadedGroup} params=${params} meta=${meta} version=${version} />`;
}

function LoadedGroup({ params, meta, version }) {
  const found = useLoaded(() => load(params.uid, params.dir || 0), [params.uid, params.dir, version]);
  return html`<${Waiting} value=${found}>${found?.talks?.length === 0 && html`<p class="problem" role="alert">no group has the uid ${visible(params.uid)}</p>`}${found?.talks?.length > 0 && html`<${Group} found=${found} params=${params} meta=${meta} />`}</${Waiting}>`;
}

function Group({ found, params, meta }) {
  const dirs = [...new Set(found.talks.map((talk) => talk.row.dir))].sort();
  const alone = dirs.length < 2;
  const roles = rolesOf(found.talks);
  const with_ = found.talks.filter((talk) => talk.record && talk.record.rows.length);
  const scores = found.talks.map((talk) => number(talk.row.score)).filter((score) => score !== null && !Number.isNaN(score));
  const [mean, std] = meanStd(scores);
  const [first] = found.talks;
  const common = useMemo(() => commonLength(with_.map((talk) => talk.record.rows[0].ids)), [found]);
  const colour = params.colour || "advantage";
  const joined = with_.map((talk) => talk.joined[0]).find(Boolean) || null;
  const steps = [...new Set(found.talks.map((talk) => talk.row.trained_step))].filter((step) => step !== null);
  return html`<section>
    <h2>group <code>${visible(params.uid)}</code> <${Copied} text=${params.uid} /></h2>
    <p class="facts"><${Fact} name="conversations">${found.total}</${Fact}>
      ${alone && !roles.length && html`<${Fact} name="mean">${shortNumber(mean, 4)}</${Fact}><${Fact} name="std">${shortNumber(std, 4)}</${Fact}>`}
      ${alone && roles.map((role) => html`<${RoleFigures} role=${role} talks=${found.talks} />`)}
      ${alone && scores.length > 1 && !haveSignal(found.talks, meta.rounding) && html`<span class="badge bad">all scores are equal: nothing to learn from</span>`}
      ${first && html`<${Fact} name="data">${visible(first.row.data_source ?? "")} ${visible(first.row.index ?? "")}</${Fact}>`}
      ${alone && steps.map((step) => html`<${Fact} name="step"><a href=${addressOf("step", { dir: params.dir || 0, step })}>${step}</a></${Fact}>`)}
      ${found.total > MOST && html`<span class="quiet">the first ${MOST} are shown</span>`}</p>
    ${first?.record && html`<${Asked} record=${first.record} />`}
    <div class="bar"><${ColourChoice} colour=${colour} joined=${joined} onChange=${(name) => go("group", { ...params, colour: name })} />
      <${Legend} colour=${colour} /></div>
    ${common > 0 && html`<details><summary>the first ${shortNumber(common)} tokens are the same in all</summary>
      <pre class="text">${textOf(with_[0].record.rows[0].ids.slice(0, common), with_[0].pieces).text}</pre></details>`}
    <div class=${alone ? "" : "columns"}>${dirs.map((dir) => html`<div>${!alone && html`<h3>${visible(meta.dirs[dir])}</h3>`}
      ${found.talks.filter((talk) => talk.row.dir === dir).map((talk) => html`<${Sibling} key=${talk.row.request_id} talk=${talk} common=${common} colour=${colour} />`)}</div>`)}</div>
  </section>`;
}

// The question of a group and its right answer, as the data row has them.
function Asked({ record }) {
  const question = record.messages.slice(0, record.asked).filter((message) => message.role === "user").at(-1);
  const truth = record.sample.ground_truth;
  return html`<table class="plain asked">
    ${question && html`<tr><th>question</th><td><${Content} content=${question.content} /></td></tr>`}
    ${truth !== null && html`<tr><th>ground truth</th><td><${Text} text=${asText(truth)} first=${1000} /></td></tr>`}</table>`;
}

function Sibling({ talk, common, colour }) {
  const { row, record } = talk;
  const joined = talk.joined.find((each) => each.row === 0) || null;
  const columns = useMemo(() => (record && record.rows.length ? columnsOf(record.rows[0], joined) : null), [talk]);
  const advantage = joined?.advantages?.length ? number(joined.advantages[0]) : null;
  return html`<article class="sibling"><header>
      <a href=${addressOf("talk", { id: row.request_id })}><b>${row.number}</b></a>
      <${Fact} name="score">${row.score === null ? "none" : shortNumber(row.score, 4)}</${Fact}>
      <${RoleScores} row=${row} />
      ${advantage !== null && html`<${Fact} name="advantage of the first token">${shortNumber(advantage, 3)}</${Fact}>`}
      <${Badge} text=${row.fate} /><${Badge} text=${row.stop_reason} />
      <span class="quiet">${row.turns} turns, ${row.calls} calls${row.failed_calls ? ` (${row.failed_calls} failed)` : ""}, ${shortNumber(row.response_tokens)} tokens</span></header>
    ${row.answer && html`<p class="quiet">answer: ${visible(row.answer)}</p>`}
    ${columns && common < columns.ids.length
      ? html`<${Tokens} columns=${columns} pieces=${talk.pieces} colour=${colour} from=${common} compact=${true} />`
      : html`<p class="quiet">${record ? "it is the whole of what all have in common" : visible(row.why || "there is no record of it")}</p>`}
  </article>`;
}

// A step's timeline, and who made it late.
import { html, addressOf, go, seconds, shortId, shortNumber, useEffect, useLoaded, useMemo, visible, Badge, Fact, Waiting } from "./lib.js";
import { source } from "./data.js";
import { Gantt } from "./gantt.js";

export function StepView({ params, version }) {
  return params.step === undefined ? html`<${FirstStep} version=${version} />` : html`<${OneStep} params=${params} version=${version} />`;
}

// Where the address names no step: goes to the first that is there.
function FirstStep({ version }) {
  const found = useLoaded(async () => (await source.firstStep()) ?? null, [version]);
  useEffect(() => {
    if (found?.step !== undefined) go("step", { ...found, validation: found.validation || undefined }, true);
  }, [found]);
  return html`<${Waiting} value=${found}>${found === null && html`<p class="quiet">no conversation of any step is recorded</p>`}</${Waiting}>`;
}

function OneStep({ params, version }) {
  const asked = { dir: params.dir || 0, step: params.step || 0, validation: params.validation || 0 };
  const found = useLoaded(() => source.step(asked), [asked, version]);
  return html`<${Waiting} value=${found}>${found?.conversations && html`<${Step} found=${found} params=${params} />`}</${Waiting}>`;
}

function Step({ found, params }) {
  const order = params.order || "ended";
  const lanes = useMemo(() => {
    const made = found.conversations.map((each) => ({ ...each, name: `${shortId(each.uid)} number ${each.number}, score ${shortNumber(each.score)}` }));
    return made.sort(order === "group" ? (a, b) => a.uid.localeCompare(b.uid) || a.number - b.number : (a, b) => b.ended - a.ended);
  }, [found, order]);
  const began = Math.min(...lanes.map((lane) => lane.began));
  const ended = Math.max(...lanes.map((lane) => lane.ended));
  const { late } = found;
  const step = Number(params.step);
  const to = (changes) => go("step", { ...params, ...changes });
  const open = (lane) => go("talk", { id: lane.request_id });
  return html`<section>
    <h2>${params.validation === "1" ? "validation after step" : "step"} ${step}</h2>
    <div class="bar"><button onClick=${() => to({ step: step - 1, row: undefined })} disabled=${step <= 0}>previous</button>
      <button onClick=${() => to({ step: step + 1, row: undefined })}>next</button>
      <label>order <select value=${order} onChange=${(event) => to({ order: event.target.value })}><option value="ended" selected=${order === "ended"}>last first</option>
        <option value="group" selected=${order === "group"}>by group</option></select></label>
      <span class="quiet">${shortNumber(lanes.length)} conversations that were ${found.basis} in it${found.left_out ? `; ${shortNumber(found.left_out)} more are not shown` : ""}</span></div>
    ${lanes.length === 0 ? html`<p class="quiet">no conversation of this step is recorded</p>` : html`
    <${Late} late=${late} conversations=${found.conversations} />
    ${found.trainer?.phases && html`<p class="facts">${Object.entries(found.trainer.phases).map(([name, value]) => html`<${Fact} name=${visible(name)}>${seconds(value)}</${Fact}>`)}</p>`}
    <${Gantt} lanes=${lanes} began=${began} ended=${ended} marked=${late?.request_id} selected=${params.row === undefined ? undefined : Number(params.row)}
      onSelect=${(row) => go("step", { ...params, row }, true)} onOpen=${open} />
    ${params.row !== undefined && lanes[params.row] && html`<p class="facts" aria-live="polite"><a href=${addressOf("talk", { id: lanes[params.row].request_id })}>${visible(lanes[params.row].name)}</a>
      ${Object.entries(lanes[params.row].parts).map(([name, value]) => html`<${Fact} name=${visible(name)}>${seconds(value)}</${Fact}>`)}</p>`}
    <${Longest} lanes=${lanes} />`}
  </section>`;
}

function Late({ late, conversations }) {
  if (!late) return html`<p class="quiet">who made it late is unknown: fewer than four conversations have a timeline</p>`;
  const row = conversations.find((each) => each.request_id === late.request_id);
  return html`<p id="late">The last conversation, <a href=${addressOf("talk", { id: late.request_id })}>${visible(shortId(row?.uid || ""))} ${" "}number ${row?.number}</a>,
    took <b>${seconds(late.seconds)}</b> longer than the median: most in <b>${visible(late.part)}</b>, ${seconds(late.part_s)} more than usual${
    late.by_length > 0 ? `, ${seconds(late.by_length)} of them for its larger number of tokens` : ""}.</p>`;
}

function Longest({ lanes }) {
  const parts = [...new Set(lanes.flatMap((lane) => Object.keys(lane.parts)))];
  const shown = [...lanes].sort((a, b) => b.ended - b.began - (a.ended - a.began)).slice(0, 20);
  return html`<h3>the longest</h3><div class="scroll"><table class="rows"><thead><tr><th>conversation</th><th>fate</th><th>ended</th><th class="number">score</th><th class="number">seconds</th>
    ${parts.map((part) => html`<th class="number">${visible(part)}</th>`)}</tr></thead>${shown.map((lane) => html`<tr><td><a href=${addressOf("talk", { id: lane.request_id })}>${visible(shortId(lane.uid))}${" "}
      number ${lane.number}</a></td><td><${Badge} text=${lane.fate} /></td><td><${Badge} text=${lane.stop_reason} /></td><td class="number">${shortNumber(lane.score)}</td>
      <td class="number">${seconds(lane.ended - lane.began)}</td>${parts.map((part) => html`<td class="number">${lane.parts[part] === undefined ? "" : seconds(lane.parts[part])}</td>`)}</tr>`)}</table></div>`;
}

// A session as a tree: which request and completion continues which, and what became of it.
import { html, asText, seconds, shortNumber, visible, Badge, Fact, Text, Fragment } from "./lib.js";
import { Message } from "./messages.js";

function Node({ record, number, children, onRow }) {
  const generation = record.generations[number];
  const requests = record.session?.requests || [];
  const request = requests.find((each) => each.generations.includes(number));
  const began = requests[0]?.at ?? record.began;
  return html`<li><details open>
    <summary>completion ${number} ${generation.row === null
      ? html`<${Badge} text=${generation.cause || "in no row"} />`
      : html`<button onClick=${(event) => { event.preventDefault(); onRow(generation.row, generation.start); }}>row ${generation.row}</button>`}
      ${generation.role && html` <b>${visible(generation.role)}</b>`}
      <span class="quiet"> ${generation.prompt_tokens} → ${generation.tokens} tokens, ${visible(generation.finish)}${" "}</span>
      ${request && html`<${Fact} name="request">${requests.indexOf(request)}, ${visible(request.protocol)}, after ${seconds(request.at - began)}</${Fact}>`}${" "}
      ${request && !request.delivered && html`<span class="badge bad">not delivered</span>`}
      ${generation.reward !== null && html`<${Fact} name="reward">${shortNumber(generation.reward)}</${Fact}>`}
      ${generation.summary && html`<span class="badge">summary</span>`}</summary>
    ${request?.messages.map((message) => html`<${Message} message=${message} />`)}
    ${request && Object.keys(request.wishes).length > 0 && html`<p class="quiet">${visible(asText(request.wishes))}</p>`}
    ${generation.text !== null && html`<article class="message assistant"><header><b>completion</b></header><${Text} text=${generation.text} /></article>`}
    ${children.length > 0 && html`<ul class="tree">${children}</ul>`}
  </details></li>`;
}

export function Tree({ record, onRow }) {
  const children = new Map();
  record.generations.forEach((generation, number) => {
    const parent = generation.parent ?? -1;
    children.set(parent, [...(children.get(parent) || []), number]);
  });
  const build = (number) => html`<${Node} key=${number} record=${record} number=${number} onRow=${onRow}
    children=${(children.get(number) || []).map(build)} />`;
  const session = record.session;
  const silent = (session?.requests || []).map((request, at) => [request, at]).filter(([request]) => request.generations.length === 0);
  return html`<${Fragment}>
    ${session && html`<p class="facts"><${Fact} name="requests">${session.requests.length}</${Fact}>
      <${Fact} name="roots">${session.roots}</${Fact}><${Fact} name="agent">${session.end || "?"}</${Fact}>
      ${session.reward !== null && html`<${Fact} name="session's reward">${shortNumber(session.reward)}</${Fact}>`}
      ${Object.entries(session.rewards || {}).map(([role, reward]) => html`<${Fact} name=${`reward of ${visible(role)}`}>${shortNumber(reward)}</${Fact}>`)}
      ${Object.entries(session.unenforced).map(([name, count]) => html`<${Fact} name="changes nothing">${visible(name)} (${count})</${Fact}>`)}</p>
      ${session.problem && html`<p class="problem">${visible(session.problem)}</p>`}`}
    <ul class="tree">${(children.get(-1) || []).map(build)}</ul>
    ${silent.length > 0 && html`<h3>requests without a completion</h3><ul>${silent.map(([request, at]) => html`<li>request ${at},
      ${" "}${visible(request.protocol)}${request.refused ? `, refused: ${visible(request.refused)}` : ""}</li>`)}</ul>`}
  </${Fragment}>`;
}

// The messages of a conversation, its calls and replies among them.
import { html, asText, seconds, shortNumber, visible, Badge, Fact, Fragment, Text } from "./lib.js";

export function Content({ content }) {
  if (content === null || content === undefined || content === "") return null;
  if (!Array.isArray(content)) return html`<${Text} text=${asText(content)} />`;
  return content.map((part) => (part && part.type === "text"
    ? html`<${Text} text=${asText(part.text)} />`
    : html`<p class="image">${visible(describePart(part))}</p>`));
}

function describePart(part) {
  const image = part?.image || part;
  if (image && image.digest) return `image ${(image.size || []).join(" × ")}, ${image.digest}`;
  return asText(part);
}

export function Call({ call }) {
  return html`<article class="call">
    <header><b>${visible(call.name || "a call that could not be read")}</b> <${Badge} text=${call.status} />
      <span class="quiet">${seconds(call.seconds)}${call.queue_s > 0.001 ? `, waited ${seconds(call.queue_s)}` : ""}${
        call.attempts > 1 ? `, ${call.attempts} attempts` : ""}</span>
      ${["cached", "truncated", "altered"].filter((name) => call[name]).map((name) => html`<span class="badge">${name}</span>`)}
      ${call.reward !== 0 && html`<${Fact} name="reward">${shortNumber(call.reward)}</${Fact}>`}
      ${call.tool && call.tool !== call.name && html`<${Fact} name="answered by">${visible(call.tool)}</${Fact}>`}</header>
    <${Text} text=${asText(call.arguments ?? "")} first=${2000} />
    <div class="answer"><${Text} text=${call.text} first=${2000} /></div>
    ${call.images.map((image) => html`<p class="image">${visible(describePart(image))}</p>`)}
    ${Object.keys(call.metrics).length > 0 && html`<p class="quiet">${visible(asText(call.metrics))}</p>`}
  </article>`;
}

const ROLES = new Set(["system", "user", "assistant", "tool"]);
export function Message({ message, asked, children }) {
  const role = visible(message.role ?? "?");
  return html`<article class=${`message ${ROLES.has(role) ? role : ""}`}>
    <header><b>${role}</b>${message.name ? html` <span class="quiet">${visible(message.name)}</span>` : ""}
      ${asked && html` <span class="quiet">of the data row</span>`}</header>
    ${message.reasoning_content && html`<div class="reasoning"><${Content} content=${message.reasoning_content} /></div>`}
    <${Content} content=${message.content} />
    ${children}
  </article>`;
}

export function Messages({ record }) {
  const byId = new Map(record.calls.map((call) => [call.id, call]));
  const shown = new Set();
  const parts = record.messages.map((message, at) => {
    const calls = (Array.isArray(message.tool_calls) ? message.tool_calls : []).map((each) => byId.get(each?.id)).filter(Boolean);
    calls.forEach((call) => shown.add(call));
    const unread = (Array.isArray(message.tool_calls) ? message.tool_calls : []).filter((each) => !byId.has(each?.id));
    return html`<${Message} message=${message} asked=${at < record.asked}>
      ${calls.map((call) => html`<${Call} call=${call} />`)}
      ${unread.map((each) => html`<${Text} text=${asText(each)} first=${1000} />`)}</${Message}>`;
  });
  const left = record.calls.filter((call) => !shown.has(call));
  return html`<${Fragment}>${parts}
    ${left.length > 0 && html`<h3>calls that no message names</h3>${left.map((call) => html`<p class="quiet">turn ${call.turn}</p><${Call} call=${call} />`)}`}
    ${record.replies.length > 0 && html`<h3>replies of the interaction</h3>${record.replies.map((reply) => html`<article class="message">
      <header><b>${reply.turn === null ? "opening" : `to turn ${reply.turn}`}</b>
        ${reply.reward !== null && html`<${Fact} name="reward">${shortNumber(reply.reward)}</${Fact}>`}
        ${reply.done && html`<span class="badge">done</span>`}${reply.truncated && html`<span class="badge">truncated</span>`}</header>
      <${Text} text=${reply.text} /></article>`)}`}
  </${Fragment}>`;
}

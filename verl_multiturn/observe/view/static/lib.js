// What all views share: preact with htm's templates, the address, and how things are shown.
// All text goes through text nodes: no view sets HTML.
import { h, render, Fragment } from "preact";
import { useState, useEffect, useLayoutEffect, useRef, useMemo } from "preact/hooks";
import htm from "htm";

// What a view shows goes through `visible` here: no view can forget it.
const shown = (value) => (typeof value === "string" ? visible(value) : Array.isArray(value) ? value.map(shown) : value);
const element = (type, props, ...children) =>
  h(type, props?.title && typeof type === "string" ? { ...props, title: visible(props.title) } : props, ...children.map(shown));
export const html = htm.bind(element);
export { render, Fragment, useState, useEffect, useLayoutEffect, useRef, useMemo };

// The address: #VIEW?NAME=VALUE&… holds the whole state, so that it can be sent to somebody and gone back to.
export function readAddress() {
  const [view, query] = location.hash.slice(1).split("?");
  return { view: view || "run", params: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function addressOf(view, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(kept).toString();
  return `#${view}${query ? `?${query}` : ""}`;
}

export function go(view, params = {}, replace = false) {
  const address = addressOf(view, params);
  if (address === location.hash) return;
  if (replace) {
    history.replaceState(null, "", address);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = address;
}

// Returns what a promise became: undefined while it is on its way, {error} where it failed.
export function useLoaded(load, dependencies) {
  const [state, setState] = useState({ key: null, value: undefined });
  const key = JSON.stringify(dependencies);
  useEffect(() => {
    let current = true;
    load().then(
      (value) => current && setState({ key, value }),
      (error) => current && setState({ key, value: { error: String(error.message || error) } }),
    );
    return () => { current = false; };
  }, [key]);
  return state.value; // what was there stays until the new is there: nothing flickers
}

// Characters that are not drawn, or that hide or turn what is around them, are shown as what they are; the same rule as
// `printable` in describe.py. A selector of an emoji's form stays behind its symbol.
const HIDDEN = /(?<!\p{So})[\ufe0e\ufe0f]|(?![\n\t\ufe0e\ufe0f])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\p{DI}\u2800]/gu;
export function visible(text) {
  return String(text).replace(HIDDEN, (letter) => {
    const code = letter.codePointAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

// JSON has no NaN: the texts stand for it.
export const WORDS = { nan: NaN, inf: Infinity, "-inf": -Infinity };
export function number(value) {
  return typeof value === "string" ? WORDS[value] ?? NaN : value;
}

export function shortNumber(value, digits = 3) {
  const given = number(value);
  if (given === null || given === undefined) return "";
  if (!Number.isFinite(given)) return String(value);
  if (Number.isInteger(given)) return given.toLocaleString("en").replace(/,/g, " ");
  return String(Number(given.toPrecision(digits)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value >= 3600) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 100) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return value >= 1 ? `${value.toFixed(1)} s` : `${Math.round(value * 1000)} ms`;
}

export const clock = (at) => (at ? new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ") : "");
const SHORT = 8; // of a long id the beginning: the command line and the filter take it, too
export const shortId = (id) => (id.length > 14 ? id.slice(0, SHORT) : id);
// An id of which what can be selected and copied is a beginning that every command takes.
export function Id({ id }) {
  const short = shortId(id);
  return html`<code class=${short === id ? "" : "short"} title=${visible(id)}>${visible(short)}</code>`;
}
export function Copied({ text }) {
  const [done, setDone] = useState(false);
  const copy = () => navigator.clipboard?.writeText(text).then(() => setDone(true), () => setDone(false));
  return html`<button class="more" onClick=${copy}>${done ? "copied" : "copy"}</button>`;
}
export const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));

const FIRST = 4000;
const MORE = 200000;
// A text, of a long one the beginning: what is not shown is laid out by nobody.
export function Text({ text, first = FIRST, tag = "pre" }) {
  const [shown, setShown] = useState(first);
  const given = visible(text);
  const left = given.length - shown;
  return html`<${Fragment}>
    <${tag} class="text" dir="auto">${left > 0 ? given.slice(0, shown) : given}</${tag}>
    ${left > 0 && html`<button class="more" onClick=${() => setShown(shown + MORE)}>
      ${left > MORE ? `show ${shortNumber(MORE)} more of ` : "show the other "}${shortNumber(left)} characters</button>`}
  </${Fragment}>`;
}

export function Fact({ name, children, title }) {
  return html`<span class="fact" title=${title}><span class="name">${name}</span> ${children}</span>`;
}

export function Waiting({ value, children }) {
  if (value === undefined) return html`<p class="quiet" role="status">loading …</p>`;
  if (value && value.error) return html`<p class="problem" role="alert">${visible(value.error)}</p>`;
  return children;
}

const GOOD = new Set(["trained", "validated", "ok", "finished"]);
const BAD = new Set(["raised", "lost", "failed", "untrained", "killed", "error"]);
export function Badge({ text }) {
  if (!text) return null;
  const kind = GOOD.has(text) ? "good" : BAD.has(text) ? "bad" : "";
  return html`<span class=${`badge ${kind}`}>${visible(text)}</span>`;
}

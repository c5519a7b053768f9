// The page: which view the address names, and the keys that work everywhere.
import { html, render, addressOf, go, readAddress, useEffect, useLoaded, useState, visible, shortNumber, Waiting } from "./lib.js";
import { source } from "./data.js";
import { TableView } from "./table.js";
import { TalkView } from "./talk.js";
import { GroupView } from "./group.js";
import { RunView } from "./run.js";
import { StepView } from "./step.js";
import { OpenView } from "./open.js";

const VIEWS = { run: RunView, table: TableView, talk: TalkView, group: GroupView, step: StepView, open: OpenView };
const TABS = [["run", "run", "r"], ["table", "conversations", "c"], ["step", "steps", "s"], ["open", "open", "o"]];
const KEYS = [["r c s o", "run, conversations, steps, open"], ["/", "filter"], ["↑ ↓ Enter", "in a table or a timeline: go, open"],
  ["1 2 3 …", "tabs of a conversation"], ["← → ↑ ↓", "in tokens: from token to token"], ["Alt ←", "back"], ["?", "these keys"]];

function Page() {
  const [address, setAddress] = useState(readAddress());
  const [version, setVersion] = useState(0);
  const [live, setLive] = useState(false);
  const [help, setHelp] = useState(false);
  const meta = useLoaded(() => source.meta(), [version]);
  useEffect(() => {
    const changed = () => setAddress(readAddress());
    addEventListener("hashchange", changed);
    source.follow((number) => { setLive(true); setVersion(number); });
    return () => removeEventListener("hashchange", changed);
  }, []);
  useEffect(() => {
    const keys = (event) => {
      if (event.target.closest?.("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      const tab = TABS.find(([, , key]) => key === event.key);
      if (tab) go(tab[0]);
      else if (event.key === "/") { event.preventDefault(); go("table", address.view === "table" ? address.params : {}); setTimeout(() => document.getElementById("filter")?.focus(), 50); }
      else if (event.key === "?") setHelp((shown) => !shown);
      else if (event.key === "Escape") setHelp(false);
    };
    addEventListener("keydown", keys);
    return () => removeEventListener("keydown", keys);
  }, [address]);
  const View = Object.hasOwn(VIEWS, address.view) ? VIEWS[address.view] : UnknownView;
  useEffect(() => { document.title = [...new Set((meta?.runs || []).map((run) => run.name).filter(Boolean)), "verl-multiturn"].map(visible).join(" – "); }, [meta]);
  return html`<div><nav><b>verl-multiturn</b>
      ${TABS.map(([name, title, key]) => html`<a href=${addressOf(name)} title=${`key ${key}`}
        aria-current=${address.view === name ? "page" : undefined}>${title}</a>`)}
      <span class="grow"></span><span class="quiet" id="about">${meta?.dirs ? `${visible(meta.dirs.join(", "))}: ${shortNumber(meta.count)} conversations` : ""}${live ? ", live" : ""}</span>
      <button title="key ?" onClick=${() => setHelp(!help)}>keys</button></nav>
    <main><${Waiting} value=${meta}>${meta?.dirs && html`<div>
      ${help && html`<table class="plain keys">${KEYS.map(([key, what]) => html`<tr><th>${key}</th><td>${what}</td></tr>`)}</table>`}
      <${Faults} faults=${meta.faults} />
      <${View} params=${address.params} name=${address.view} meta=${meta} version=${version} live=${live} /></div>`}</${Waiting}></main></div>`;
}

function UnknownView({ name }) {
  return html`<p class="problem" role="alert">this page has no view '${visible(name)}'; it has ${Object.keys(VIEWS).filter((each) => each !== "talk" && each !== "group")
    .map((each) => html`<a href=${addressOf(each)}>${each}</a> `)}</p>`;
}

function Faults({ faults }) {
  if (!faults.length) return null;
  return html`<details class="faults"><summary>${faults.length === 1 ? "one thing" : `${faults.length} things`} could not be read, the rest is shown</summary>
    <ul>${faults.slice(0, 200).map((fault) => html`<li>${visible(fault)}</li>`)}</ul></details>`;
}

render(html`<${Page} />`, document.getElementById("app"));

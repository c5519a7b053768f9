// What runs now, and since when, by the workers' last snapshots.
import { html, addressOf, clock, seconds, shortId, shortNumber, useEffect, useLoaded, useState, visible, Fact, Id, Waiting } from "./lib.js";
import { source } from "./data.js";

export function OpenView({ version, live }) {
  const [looked, setLooked] = useState(0);
  useEffect(() => {
    if (!live) return undefined;
    const timer = setInterval(() => setLooked((count) => count + 1), 2000);
    return () => clearInterval(timer);
  }, [live]);
  const found = useLoaded(() => source.open(), [version, looked]);
  return html`<${Waiting} value=${found}>${found?.snapshots && html`<${Open} snapshots=${found.snapshots} />`}</${Waiting}>`;
}

function Open({ snapshots }) {
  const rows = snapshots.flatMap((shot) => shot.open.map((each) => ({ ...each, waited: shot.at - each.since, lasted: shot.at - each.began })))
    .sort((a, b) => b.waited - a.waited);
  const doing = new Map();
  for (const row of rows) doing.set(row.doing, (doing.get(row.doing) || 0) + 1);
  return html`<section><h2>what runs now</h2>
    ${snapshots.length === 0 && html`<p class="quiet">no worker has left a snapshot</p>`}
    ${snapshots.map((shot) => html`<p class="facts"><${Fact} name="worker">${visible(shot.file)}</${Fact}><${Fact} name="looked at">${clock(shot.at)}</${Fact}>
      <${Fact} name="open">${shot.open.length}</${Fact}>${shot.dropped > 0 && html`<span class="badge bad">${shortNumber(shot.dropped)} records could not be kept</span>`}
      ${shot.over && html`<span class="badge">this run is over</span>`}</p>`)}
    <p class="facts">${[...doing].sort((a, b) => b[1] - a[1]).map(([name, count]) => html`<${Fact} name=${visible(name)}>${count}</${Fact}>`)}</p>
    ${rows.length > 0 && html`<div class="scroll"><table class="rows"><thead><tr><th>waits for</th><th class="number">since</th><th class="number">lasts</th><th class="number">turns</th><th class="number">step</th><th>group</th><th class="number">number</th><th>conversation</th></tr></thead>
      ${rows.slice(0, 1000).map((row) => html`<tr><td>${visible(row.doing)}</td><td class="number">${seconds(row.waited)}</td><td class="number">${seconds(row.lasted)}</td>
        <td class="number">${row.turn}</td><td class="number">${row.step}</td><td><${Id} id=${row.uid} /></td><td class="number">${row.number}</td>
        <td><a href=${addressOf("talk", { id: row.request_id })}>${visible(shortId(row.request_id))}</a></td></tr>`)}</table></div>`}
  </section>`;
}

// Where the data come from: the server of this page's address, or the page itself where it was exported.
import { matcher, compare } from "./query.js";

// Returns the first of some steps: of the first folder, and no validation where there is something else.
function first(steps) {
  return steps.sort((a, b) => a.validation - b.validation || a.dir - b.dir || a.step - b.step)[0];
}

class LiveSource {
  async ask(what, params = {}) {
    const kept = Object.entries(params).filter(([, value]) => value !== undefined);
    const answer = await fetch(`api/${what}?${new URLSearchParams(kept)}`);
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error || `the server answers ${answer.status}`);
    return found;
  }
  meta() { return this.ask("meta"); }
  table(params) { return this.ask("table", params); }
  record(id) { return this.ask("record", { id }); }
  run() { return this.ask("run"); }
  async firstStep() {
    const { dirs } = await this.run();
    return first(dirs.flatMap(({ steps }, dir) => steps.filter((each) => each.conversations).map(({ step, event }) => ({ dir, step, validation: Number(event === "validation") }))));
  }
  findings() { return this.ask("findings"); }
  step(params) { return this.ask("step", params); }
  open() { return this.ask("open"); }
  // Calls back after each change, for as long as the server follows the run.
  async follow(changed) {
    let since = -1;
    for (;;) {
      try {
        const found = await this.ask("changes", { since });
        if (!found.follow) return;
        if (found.version !== since) changed(found.version);
        since = found.version;
      } catch (error) {
        await new Promise((resolve) => setTimeout(resolve, 3000));
      }
    }
  }
}

async function unpack(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

class FileSource {
  constructor() { this.blocks = new Map(); }
  base() { return (this.loaded ??= unpack("data-base")); }
  async meta() { return (await this.base()).meta; }
  async run() { return (await this.base()).run; }
  async firstStep() { // of those that the page holds
    const held = [...document.querySelectorAll("[id^='step-']")].map(({ id }) => id.split("-").slice(1).map(Number));
    return first(held.map(([dir, step, validation]) => ({ dir, step, validation })));
  }
  async findings() { return (await this.base()).findings; }
  async open() { return (await this.base()).open; }
  async rows() {
    if (!this.all) {
      const { columns, names } = (await this.base()).table;
      this.all = columns[0].map((_, at) => Object.fromEntries(names.map((name, which) => [name, columns[which][at]])));
      this.numbers = new Map(this.all.map((row, number) => [row.request_id, number]));
    }
    return this.all;
  }
  async table({ where = "", sort = "began", desc = 0, offset = 0, limit = 50 }) {
    const [rows, meta] = [await this.rows(), await this.meta()];
    const matches = matcher(where, meta.columns);
    const found = rows.filter(matches);
    found.sort(compare(sort, Number(desc), rows)); // stable, as the server's
    return { total: found.length, rows: found.slice(Number(offset), Number(offset) + Number(limit)) };
  }
  async block(name) {
    if (!this.blocks.has(name)) this.blocks.set(name, unpack(name));
    return this.blocks.get(name);
  }
  async record(id) {
    const [rows, base] = [await this.rows(), await this.base()];
    const row = rows[this.numbers.get(id)];
    if (!row) throw new Error(`no conversation of this page has the id ${id}`);
    const at = base.places[this.numbers.get(id)];
    const block = await this.block(`data-${Math.floor(at / base.block)}`);
    return { ...block[at % base.block], row, pieces: base.pieces[row.dir] };
  }
  async step({ dir, step, validation }) {
    const name = `step-${dir}-${step}-${Number(validation)}`;
    if (!document.getElementById(name)) throw new Error("the page holds no timeline of this step");
    return this.block(name);
  }
  async follow() {}
}

export const source = document.getElementById("data-base") ? new FileSource() : new LiveSource();

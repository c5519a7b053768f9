// Tokens: their columns, their text, and colours that are CSS highlights, so that a token needs no element of its own.
import { html, useEffect, useLayoutEffect, useMemo, useRef, number, shortNumber, visible } from "./lib.js";

export const SOURCES = ["prompt", "sampled", "template", "observation", "injected", "earlier"];
export const SAMPLED = 1;

// Returns the full columns of a row, as `records.rows.columns`, and those of its join.
export function columnsOf(row, joined) {
  const count = row.ids.length;
  const columns = {
    ids: row.ids, mask: new Uint8Array(count), versions: new Int32Array(count), turns: new Int32Array(count),
    sources: new Uint8Array(count), logprobs: new Float64Array(count).fill(NaN), sampled: new Int32Array(count).fill(-1),
  };
  let at = 0;
  let sampled = 0;
  for (const [length, mask, version, turn, source] of row.runs) {
    const end = Math.min(at + length, count);
    columns.mask.fill(mask, at, end);
    columns.versions.fill(version, at, end);
    columns.turns.fill(turn, at, end);
    columns.sources.fill(source, at, end);
    if (source === SAMPLED) {
      for (let place = at; place < end; place++) {
        columns.sampled[place] = sampled;
        columns.logprobs[place] = number(row.logprobs[sampled++]);
      }
    }
    at = end;
  }
  columns.joined = joined || null;
  return columns;
}

// Returns what a list of a join says of each token; NaN where the token was not sampled or nothing was recorded.
function spread(columns, list, value = (given) => given) {
  return Float64Array.from(columns.sampled, (place, at) => {
    if (place < 0 || !list || list[place] === undefined) return NaN;
    return value(number(list[place]), at);
  });
}

// How a token may be coloured: its value, its colours (kind) and its scale. `level` gives one of -4 … 4 or 0 … 8.
const negative = (scale) => (value) => Math.max(-4, Math.min(4, Math.sign(value) * Math.ceil((4 * Math.abs(value)) / scale - 1e-9)));
const steps = (limits) => (value) => limits.reduce((level, limit) => level + (value >= limit), 0);
export const COLOURS = {
  source: { title: "source", kind: "source", values: (c) => Float64Array.from(c.sources), level: (value) => value },
  logprob: {
    title: "log-probability (rollout)", kind: "seq", values: (c) => c.logprobs,
    level: (value) => steps([0.05, 0.2, 0.5, 1, 2, 3.5, 5, 8])(-value),
    scale: "colour grows from p > 0.95 to log p < −8",
  },
  drift: {
    title: "trainer − rollout", kind: "div", needs: "old_log_probs", scale: "full colour from ±0.5 on",
    values: (c) => spread(c, c.joined?.old_log_probs, (value, at) => value - c.logprobs[at]), level: negative(0.5),
  },
  entropy: {
    title: "entropy", kind: "seq", needs: "entropy", scale: "colour grows from 0.02 to 3 nats",
    values: (c) => spread(c, c.joined?.entropy), level: steps([0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 3]),
  },
  advantage: {
    title: "advantage", kind: "div", needs: "advantages", values: (c) => spread(c, c.joined?.advantages), level: negative(2),
    scale: "full colour from ±2 on",
  },
  age: {
    title: "age (weight versions)", kind: "seq", needs: "step", scale: "0 to 8; step s begins with version s − 1",
    values: (c) => Float64Array.from(c.versions, (version, at) => (c.sampled[at] < 0 || c.joined.validation ? NaN : c.joined.step - 1 - version)),
    level: steps([1, 2, 3, 4, 5, 6, 7, 8]),
  },
  trained: {
    title: "trained", kind: "cat", needs: "trained", level: (value) => value,
    values: (c) => {
      const left = new Set(c.joined?.untrained_tokens || []);
      const whole = !c.joined || c.joined.validation || (c.joined.untrained && !c.joined.untrained_tokens);
      return Float64Array.from(c.sampled, (place) => (place < 0 ? NaN : whole || left.has(place) ? 0 : 1));
    },
  },
};

// Returns whether the loss counted a sampled token: the mask says it of none, for a validation has one, too.
function inLoss(columns, place) {
  const { joined } = columns;
  if (!joined) return "unknown (no join)";
  if (joined.validation) return "no (validation)";
  if (!joined.untrained) return "yes";
  return joined.untrained_tokens && !joined.untrained_tokens.includes(place) ? "yes" : `no (${joined.untrained})`;
}

// Returns the text of tokens, and where each begins. Bytes that are no whole letter belong to the token that ends it.
export function textOf(ids, pieces) {
  const starts = new Uint32Array(ids.length + 1);
  const parts = [];
  const decoder = new TextDecoder("utf-8");
  let length = 0;
  let pending = false;
  ids.forEach((id, at) => {
    starts[at] = length;
    const piece = pieces ? pieces[id] : undefined;
    let text;
    if (Array.isArray(piece)) {
      text = decoder.decode(Uint8Array.from(piece), { stream: true });
      pending = true;
    } else {
      text = (pending ? decoder.decode() : "") + (piece === undefined ? `${pieces ? "⟨" : ""}${id}${pieces ? "⟩" : " "}` : piece);
      pending = false;
    }
    text = visible(text);
    parts.push(text);
    length += text.length;
  });
  if (pending) {
    const rest = decoder.decode();
    parts.push(rest);
    length += rest.length;
  }
  starts[ids.length] = length;
  return { text: parts.join(""), starts };
}

// Returns the name of the highlight of each token; "" without a colour.
export function paint(columns, colour) {
  const { values, level, kind, needs } = COLOURS[colour];
  if (needs && (columns.joined?.[needs] ?? null) === null) return new Array(columns.ids.length).fill("");
  return Array.from(values(columns), (value) => (Number.isNaN(value) ? "" : `${kind}${level(value)}`));
}

// Tokens in one text node. A browser keeps a node's colours in a list, and with all in one it would take seconds.
const CHUNK = 512;

// Colours tokens, and returns what takes the colours away again. Several texts of a page share the highlights.
function highlight(element, starts, names, first, last) {
  const added = [];
  for (let at = first; at < last; ) {
    const name = names[at];
    const from = at;
    const chunk = Math.floor((at - first) / CHUNK);
    const end = Math.min(last, first + (chunk + 1) * CHUNK);
    while (at < end && names[at] === name) at++;
    const base = starts[first + chunk * CHUNK];
    if (!name || starts[at] === starts[from]) continue;
    const node = element.childNodes[chunk];
    const range = new StaticRange({
      startContainer: node, startOffset: starts[from] - base, endContainer: node, endOffset: starts[at] - base,
    });
    if (!CSS.highlights.has(name)) CSS.highlights.set(name, new Highlight());
    CSS.highlights.get(name).add(range);
    added.push([name, range]);
  }
  return () => added.forEach(([name, range]) => CSS.highlights.get(name)?.delete(range));
}

function tokenAt(starts, offset) {
  let [low, high] = [0, starts.length - 1];
  while (low < high - 1) {
    const middle = (low + high) >> 1;
    if (starts[middle] <= offset) low = middle;
    else high = middle;
  }
  return low;
}

function describe(columns, at, text, starts, pieces) {
  const place = columns.sampled[at];
  const facts = [["token", at], ["id", columns.ids[at]], ["source", SOURCES[columns.sources[at]]], ["turn", columns.turns[at]]];
  if (place >= 0) {
    facts.push(["version", columns.versions[at]], ["in the loss", inLoss(columns, place)]);
    facts.push(["logprob", shortNumber(columns.logprobs[at], 5)]);
    for (const [name, list] of [["trainer", "old_log_probs"], ["reference", "ref_log_probs"], ["entropy", "entropy"],
      ["advantage", "advantages"], ["weight", "importance_weights"]]) {
      const found = columns.joined?.[list]?.[place];
      if (found !== undefined) facts.push([name, shortNumber(found, 5)]);
    }
    const trainer = columns.joined?.old_log_probs?.[place];
    if (trainer !== undefined) facts.push(["trainer − rollout", shortNumber(number(trainer) - columns.logprobs[at], 4)]);
  }
  const shown = pieces ? JSON.stringify(text.slice(starts[at], starts[at + 1])) : "";
  return { shown, facts };
}

const WINDOW = 200000;
// A row's tokens. Arrow keys move from token to token; what is known of it stands below.
export function Tokens({ columns, pieces, colour, from = 0, selected, onSelect, compact = false }) {
  const node = useRef(null);
  const { text, starts } = useMemo(() => textOf(columns.ids, pieces), [columns, pieces]);
  const names = useMemo(() => paint(columns, colour), [columns, colour]);
  const last = Math.min(columns.ids.length, from + WINDOW);
  const chunks = useMemo(() => {
    const made = [];
    for (let at = from; at < last; at += CHUNK) made.push(text.slice(starts[at], starts[Math.min(last, at + CHUNK)]));
    return made;
  }, [text, from, last]);
  useLayoutEffect(() => highlight(node.current, starts, names, from, last), [chunks, names]);
  useEffect(() => {
    if (compact || selected === undefined || selected < from || selected >= last) return undefined;
    const chunk = Math.floor((selected - from) / CHUNK);
    const base = starts[from + chunk * CHUNK];
    const range = new Range();
    range.setStart(node.current.childNodes[chunk], starts[selected] - base);
    range.setEnd(node.current.childNodes[chunk], starts[selected + 1] - base);
    CSS.highlights.set("selected", new Highlight(range));
    const box = range.getBoundingClientRect();
    const outer = node.current.getBoundingClientRect();
    if (box.height && (box.top < outer.top || box.bottom > outer.bottom)) {
      node.current.scrollTop += box.top - outer.top - outer.height / 2;
    }
    return () => CSS.highlights.delete("selected");
  }, [selected, chunks]);
  const pick = (event) => {
    const found = document.caretPositionFromPoint?.(event.clientX, event.clientY);
    const chunk = found ? [...node.current.childNodes].indexOf(found.offsetNode) : -1;
    if (chunk >= 0) onSelect?.(tokenAt(starts, found.offset + starts[from + chunk * CHUNK]));
  };
  const move = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 25, ArrowUp: -25, PageDown: 250, PageUp: -250 }[event.key];
    if (by === undefined && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    const to = event.key === "Home" ? from : event.key === "End" ? last - 1 : (selected ?? from - by) + by;
    onSelect?.(Math.max(from, Math.min(last - 1, to)));
  };
  const told = !compact && selected !== undefined && selected < columns.ids.length
    ? describe(columns, selected, text, starts, pieces) : null;
  return html`<div class="tokens-box">
    <pre class=${compact ? "tokens compact" : "tokens"} tabindex="0" ref=${node} onClick=${pick} onKeyDown=${move} role="textbox"
      aria-readonly="true" aria-multiline="true" aria-label="tokens of the row">${chunks}</pre>
    ${last < columns.ids.length && html`<p class="quiet">${shortNumber(columns.ids.length - last)} more tokens are not shown</p>`}
    ${!compact && html`<p class="token-facts" aria-live="polite">${told
      ? html`<code>${told.shown}</code> ${told.facts.map(([name, value]) => html`<span class="fact"><span class="name">${name}</span> ${value}</span>`)}`
      : html`<span class="quiet">click a token, or go through them with the arrow keys</span>`}</p>`}
  </div>`;
}

export function Legend({ colour }) {
  const { kind, scale } = COLOURS[colour];
  const entries = kind === "source" ? SOURCES.map((name, at) => [`source${at}`, name])
    : kind === "cat" ? [["cat1", "trained"], ["cat0", "not trained"]]
      : kind === "div" ? [-4, -3, -2, -1, 0, 1, 2, 3, 4].map((at) => [`div${at}`, ""])
        : [0, 1, 2, 3, 4, 5, 6, 7, 8].map((at) => [`seq${at}`, ""]);
  return html`<span class="legend">${kind === "div" && "−"}${entries.map(([name, text]) =>
    html`<span class=${`swatch ${name}`}>${text || "\u00a0\u00a0"}</span>`)}${kind === "div" && "+"}
    ${scale && html`<span class="quiet"> ${scale}</span>`}</span>`;
}

export function ColourChoice({ colour, joined, onChange }) {
  return html`<label>colour <select value=${colour} onChange=${(event) => onChange(event.target.value)}>
    ${Object.entries(COLOURS).map(([name, { title, needs }]) => html`<option value=${name} selected=${name === colour}
      disabled=${needs && (joined?.[needs] === null || joined?.[needs] === undefined)}>${title}${
      needs && (joined?.[needs] === null || joined?.[needs] === undefined) ? " (not recorded)" : ""}</option>`)}
  </select></label>`;
}

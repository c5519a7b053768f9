// The filter of exported pages, as `query.py` has it for the server; a test compares both.
export const SEARCHED = ["request_id", "uid", "data_source", "index", "stop_reason", "fate", "why"];
const TERM = /\s*(?:([a-z_]+)(!=|>=|<=|=|>|<|~))?("(?:[^"]|"")*"|[^\s"]+)/y;
const WORDS = { true: true, yes: true, false: false, no: false };
const COMPARED = {
  ">": (a, b) => a > b, ">=": (a, b) => a >= b, "<": (a, b) => a < b, "<=": (a, b) => a <= b,
};

// Returns a text as a filter's value.
export function quoted(text) {
  return `"${text.replaceAll('"', '""')}"`;
}

export function parse(text) {
  const given = text.trim();
  const terms = [];
  TERM.lastIndex = 0;
  while (TERM.lastIndex < given.length) {
    const at = TERM.lastIndex;
    const found = TERM.exec(given);
    if (!found) {
      throw new Error(`the filter cannot be read from "${given.slice(at)}" on; expected terms such as step>=3, ` +
        'score<1, stop_reason=length or a word; put a value with spaces between "');
    }
    const [, name = "", operator = "", value] = found;
    const isQuoted = value.startsWith('"');
    const plain = isQuoted ? value.slice(1, -1).replaceAll('""', '"') : value;
    const several = (operator === "=" || operator === "!=") && !isQuoted;
    terms.push({ name, operator, values: several ? plain.split(",") : [plain] });
  }
  return terms;
}

const isMissing = (value) => value === null || value === undefined;
const asNumber = (value) => ({ nan: NaN, inf: Infinity, "-inf": -Infinity })[value] ?? value;
const holds = (value, text) => !isMissing(value) && String(value).toLowerCase().includes(text.toLowerCase());

function valueOf(name, text, kind) {
  if (kind === "text") return text;
  if (kind === "bool") {
    if (!(text.toLowerCase() in WORDS)) throw new Error(`the filter compares ${name} with "${text}"; expected true or false`);
    return WORDS[text.toLowerCase()];
  }
  const made = text.trim() === "" ? NaN : Number(text);
  if (Number.isNaN(made) && text !== "nan") throw new Error(`the filter compares ${name} with "${text}"; expected a number`);
  return made;
}

function termMatcher({ name, operator, values }, columns) {
  if (!name) return (row) => SEARCHED.some((column) => holds(row[column], values[0]));
  const kind = columns[name];
  if (!kind) throw new Error(`the filter names the column "${name}"; expected one of ${Object.keys(columns).join(", ")}`);
  if (operator === "~") {
    if (kind !== "text") throw new Error(`the filter ${name}~${values[0]} is for texts, and ${name} is a number; use =, <, >`);
    return (row) => holds(row[name], values[0]);
  }
  if (operator in COMPARED) {
    if (kind === "text") throw new Error(`the filter ${name}${operator}${values[0]} is for numbers, and ${name} is a text; use = or ~`);
    const limit = valueOf(name, values[0], kind);
    return (row) => !isMissing(row[name]) && COMPARED[operator](asNumber(row[name]), limit);
  }
  const tests = values.map((text) => {
    if (text === "none") return (value) => isMissing(value);
    const wanted = valueOf(name, text, kind);
    return (value) => !isMissing(value) && (kind === "number" ? asNumber(value) : value) === wanted;
  });
  const some = (row) => tests.some((test) => test(row[name]));
  return operator === "!=" ? (row) => !some(row) : some;
}

export function matcher(text, columns) {
  const tests = parse(text).map((term) => termMatcher(term, columns));
  return (row) => tests.every((test) => test(row));
}

// Rows without a value come last, whatever the order.
export function compare(name, descending) {
  const sign = descending ? -1 : 1;
  const rank = (value) => (isMissing(value) ? 2 : Number.isNaN(value) ? 1 : 0);
  return (one, other) => {
    const [a, b] = [asNumber(one[name]), asNumber(other[name])];
    const ranks = rank(a) - rank(b);
    if (ranks || rank(a)) return ranks;
    return a < b ? -sign : a > b ? sign : 0;
  };
}

// Spans of time as bars: a lane for each conversation, drawn on a canvas, since a step has ten thousands of them.
import { html, seconds, useEffect, useLayoutEffect, useRef, useState, visible } from "./lib.js";

export const PARTS = { generation: "engine", pause: "pause", wait: "queue", call: "tool", interaction: "interaction", create: "other",
  release: "other", reward: "reward", teacher: "reward", store: "other", request: "request" };
const HEIGHT = 14;
const TOP = 22;

function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["engine", "pause", "queue", "tool", "interaction", "reward", "request", "other", "ink", "quiet", "line", "mark"]
    .map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

function ticks(length) {
  const rough = length / 8;
  const base = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((times) => times * base).find((each) => each >= rough) || rough;
  return Array.from({ length: Math.floor(length / size) + 1 }, (_, at) => at * size);
}

export function Gantt({ lanes, began, ended, marked, selected, onSelect, onOpen }) {
  const canvas = useRef(null);
  const [over, setOver] = useState(null);
  const [dark, setDark] = useState(0);
  const length = Math.max(ended - began, 0.001);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setDark((count) => count + 1);
    query.addEventListener("change", changed);
    addEventListener("resize", changed);
    return () => { query.removeEventListener("change", changed); removeEventListener("resize", changed); };
  }, []);
  useLayoutEffect(() => {
    const element = canvas.current;
    const width = element.parentElement.clientWidth;
    const height = TOP + lanes.length * HEIGHT;
    const ratio = height * devicePixelRatio > 30000 ? 1 : devicePixelRatio;
    element.width = width * ratio;
    element.height = height * ratio;
    element.style.height = `${height}px`;
    const pen = element.getContext("2d");
    const ink = colours();
    const x = (at) => ((at - began) / length) * (width - 10);
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui";
    for (const at of ticks(length)) {
      pen.fillStyle = ink.line;
      pen.fillRect(x(began + at), 0, 1, height);
      pen.fillStyle = ink.quiet;
      pen.fillText(seconds(at), x(began + at) + 3, 12);
    }
    lanes.forEach((lane, row) => {
      const y = TOP + row * HEIGHT;
      if (lane.request_id === marked || row === selected) {
        pen.fillStyle = ink.mark;
        pen.fillRect(0, y, width, HEIGHT);
      }
      if (lane.began !== undefined) {
        pen.fillStyle = ink.line;
        pen.fillRect(x(lane.began), y + HEIGHT / 2, Math.max(1, x(lane.ended) - x(lane.began)), 1);
      }
      const deep = (span) => (span[0] === "request" ? 0 : 1); // what holds others lies below them
      for (const [kind, , , start, end] of [...lane.spans].sort((a, b) => deep(a) - deep(b))) {
        pen.fillStyle = ink[PARTS[kind] || "other"];
        pen.fillRect(x(start), y + 2, Math.max(1, x(end) - x(start)), HEIGHT - 4);
      }
    });
  }, [lanes, began, ended, marked, selected, dark]);
  const at = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - TOP) / HEIGHT);
    const time = began + ((event.clientX - box.left) / (box.width - 10)) * length;
    const lane = lanes[row];
    return lane ? { row, lane, time, span: lane.spans.filter(([, , , start, end]) => start <= time && time <= end).pop() } : null;
  };
  const keys = (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) {
      event.preventDefault();
      onSelect?.(Math.max(0, Math.min(lanes.length - 1, (selected ?? -1) + by)));
    } else if (event.key === "Enter" && lanes[selected]) onOpen?.(lanes[selected]);
  };
  const said = over?.span ? `${over.span[0]} ${over.span[1]}: ${seconds(over.span[4] - over.span[3])}, after ${seconds(over.span[3] - began)}` : "";
  return html`<div class="gantt"><p class="quiet gantt-said">${over ? visible(`${over.lane.name}  ${said}`)
    : Object.entries(LEGEND).map(([name, text]) => html`<span><span class=${`dot ${name}`}></span>${text} </span>`)}</p>
    <canvas ref=${canvas} tabindex="0" role="img" aria-label="timeline" onMouseMove=${(event) => setOver(at(event))} onMouseLeave=${() => setOver(null)}
      onClick=${(event) => { const found = at(event); if (found) onOpen?.(found.lane); }} onKeyDown=${keys}></canvas></div>`;
}

const LEGEND = { engine: "generation", pause: "engine pause", queue: "wait", tool: "call", interaction: "interaction", reward: "reward",
  request: "request", other: "other" };

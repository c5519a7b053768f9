// A chart of uPlot, which draws by itself and is told of changes.
import { html, useLayoutEffect, useRef, visible } from "./lib.js";

const LINES = ["#3b7dd8", "#d9663b", "#2f9e64", "#9c5cc4", "#b8860b", "#5b6b7b"];

// Values that are all the same get an axis around them.
function between(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const space = Math.abs(low) || 1;
  return low === high ? [low - space / 10, high + space / 10] : globalThis.uPlot.rangeNum(low, high, 0.1, true);
}

export function Chart({ title, series, onPick, range, height = 170 }) {
  const box = useRef(null);
  const steps = [...new Set(series.flatMap((each) => each.points.map(([step]) => step)))].sort((a, b) => a - b);
  const key = JSON.stringify(series);
  useLayoutEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const [ink, grid] = [style.getPropertyValue("--quiet"), style.getPropertyValue("--line")];
    const columns = series.map((each) => {
      const values = new Map(each.points);
      return steps.map((step) => values.get(step) ?? null);
    });
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui" };
    const last = (own) => steps.length && own.setLegend({ idx: steps.length - 1 }, false);
    const chart = new globalThis.uPlot({
      width: box.current.clientWidth || 360, height, cursor: { y: false },
      scales: { x: { time: false, range: steps.length < 2 ? [steps[0] - 1, steps[0] + 1] : undefined }, y: { range: range || between } },
      legend: { live: true },
      // Without a cursor the legend has the values of the last step.
      hooks: { ready: [last], setLegend: [(own) => own.legend.idx === null && last(own)] },
      axes: [axis, { ...axis, size: 60, values: (_, splits) => splits.map((value) => String(Number(value.toPrecision(3)))) }],
      series: [{ label: "step" }, ...series.map((each, at) => ({
        label: visible(each.name), stroke: LINES[at % LINES.length], width: 1.5, dash: each.dashed ? [5, 4] : undefined, spanGaps: true,
        points: { show: steps.length < 40, size: 4 }, value: (_, value) => (value === null ? "" : String(Number(value.toPrecision(4)))),
      }))],
    }, [steps, ...columns], box.current);
    const resized = () => chart.setSize({ width: box.current.clientWidth, height });
    addEventListener("resize", resized);
    const picked = (event) => {
      const at = chart.cursor.idx;
      if (!onPick || at === null || at === undefined) return;
      const height = event.clientY - chart.over.getBoundingClientRect().top;
      const far = (which) => Math.abs(chart.valToPos(columns[which][at], "y") - height);
      const there = series.map((_, which) => which).filter((which) => columns[which][at] !== null && chart.series[which + 1].show);
      if (there.length) onPick(steps[at], series[there.reduce((best, which) => (far(which) < far(best) ? which : best))]);
    };
    chart.over.addEventListener("click", picked);
    return () => { removeEventListener("resize", resized); chart.destroy(); };
  }, [key]);
  return html`<figure class="chart"><figcaption>${title}</figcaption><div ref=${box}></div></figure>`;
}

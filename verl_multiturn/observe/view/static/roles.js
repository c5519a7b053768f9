// Rewards of conversations by role, and whether a group has a signal. Without roles a conversation has one reward.
import { html, number, shortNumber, visible, Fact } from "./lib.js";

export function meanStd(values) {
  if (!values.length) return [null, null];
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  if (values.length < 2) return [mean, null];
  return [mean, Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1))];
}

// Tells whether rewards differ by rounding alone, as `reward_numbers.are_equal` does; `within` is its constant.
export function areEqual(scores, within) {
  return Math.max(...scores) - Math.min(...scores) <= within * Math.max(...scores.map(Math.abs));
}

// Returns the names of the roles of some conversations, in order.
export function rolesOf(talks) {
  return [...new Set(talks.flatMap(({ row }) => Object.keys(row.roles || {})))].sort();
}

function scoresOf(talks, role) {
  return talks.map(({ row }) => number(row.roles ? row.roles[role]?.score ?? null : row.score)).filter((score) => score !== null && !Number.isNaN(score));
}

// Tells whether two conversations differ in the reward of one same role, as `reward_numbers.have_signal` does.
export function haveSignal(talks, within) {
  const roles = rolesOf(talks);
  return (roles.length ? roles : [null]).some((role) => {
    const scores = scoresOf(talks, role);
    return scores.length > 1 && !areEqual(scores, within);
  });
}

// Mean and deviation of a role's rewards in a group.
export function RoleFigures({ role, talks }) {
  const [mean, std] = meanStd(scoresOf(talks, role));
  return html`<${Fact} name=${`mean of ${visible(role)}`}>${shortNumber(mean, 4)}</${Fact}><${Fact} name=${`std of ${visible(role)}`}>${shortNumber(std, 4)}</${Fact}>`;
}

// The reward of each role of a conversation, and the mean of its advantages.
export function RoleScores({ row }) {
  return Object.entries(row.roles || {}).map(([role, own]) => html`<${Fact} name=${visible(role)}>${own.score === null ? "none" : shortNumber(own.score, 4)}${
    own.advantage === null ? "" : `, advantage ${shortNumber(own.advantage, 3)}`}</${Fact}>`);
}

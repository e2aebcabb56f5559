// Numbers, times and names as people read them.

const WHOLE = new Intl.NumberFormat("en");
export const NONE = "–";

export const whole = (value) => WHOLE.format(Math.round(value));

export const percent = (share) => (share === null || share === undefined ? NONE : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`);

export const rate = (value) => (value >= 100 ? whole(value) : value.toFixed(value >= 10 ? 1 : 2));

/** A duration with the unit that suits it. */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1e-3) return `${whole(value * 1e6)} µs`;
  if (value < 0.0995) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${whole(value * 1e3)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : `${whole(value)} s`;
}

/** A moment today as a time, an earlier one with its day. */
export function moment(at) {
  const date = new Date(at * 1000);
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
}

export const bytes = (value) => (value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(2)} GiB` : `${whole(value / 2 ** 20)} MiB`);

/** The end of an id that tells it from others. */
export const short = (id) => (id.length > 12 ? `…${id.slice(-8)}` : id);

/** Replicas keep number and colour as long as the page is open. */
const numbers = new Map();
export function number(replica) {
  if (!numbers.has(replica)) numbers.set(replica, numbers.size + 1);
  return numbers.get(replica);
}

export const hue = (replica) => `r${(number(replica) - 1) % 8}`;

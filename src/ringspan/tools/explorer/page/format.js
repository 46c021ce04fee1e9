// Numbers as people read them.

export const whole = (count) => count.toLocaleString("en-US");

export function bytes(count) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (count >= size) return `${short(count / size)} ${unit}`;
  }
  return `${count} B`;
}

export function pairs(count) {
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6]]) if (count >= size) return `${short(count / size)} ${unit}`;
  return whole(count);
}

export const short = (x) => (x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2));

export const times = (ratio) => (ratio >= 1.995 ? `${short(ratio)} x` : ratio >= 0.1 ? `${Math.round(ratio * 100)} %` : `${(ratio * 100).toPrecision(2)} %`);

// Rows [start, stop, step] in words.
export function rangeText([start, stop, by]) {
  const count = Math.ceil((stop - start) / by);
  if (count === 1) return whole(start);
  if (by === 1) return `${whole(start)} to ${whole(stop - 1)}`;
  const last = start + (count - 1) * by;
  return `${whole(start)}, ${whole(start + by)}${count > 2 ? `${count > 3 ? " .." : ","} ${whole(last)}` : ""} (every ${by === 2 ? "2nd" : by === 3 ? "3rd" : `${whole(by)}th`})`;
}

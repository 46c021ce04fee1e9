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

// Numbers as people read them. Sizes are slots unless said otherwise; times are seconds or microseconds.

const SPACE = "\u202f"; // narrow, and no line breaks at it

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function grouped(number) {
  return whole.format(number).replaceAll(",", SPACE);
}

export function count(number) {
  if (!Number.isFinite(number)) return "–";
  const size = Math.abs(number);
  if (size < 1e4) return size < 10 && !Number.isInteger(number) ? number.toFixed(1) : grouped(number);
  for (const [limit, unit] of [[1e6, "k"], [1e9, "M"], [1e12, "G"], [Infinity, "T"]]) {
    if (size < limit * 0.9995) {
      const part = number / (limit === Infinity ? 1e12 : limit / 1e3);
      return `${Math.abs(part) < 99.95 ? part.toFixed(1) : grouped(part)}${SPACE}${unit}`;
    }
  }
  return String(number);
}

export function percent(number) {
  if (!Number.isFinite(number)) return "–";
  const digits = number !== 0 && Math.abs(number) < 10 ? 1 : Math.abs(number) < 99.95 && number % 1 ? 1 : 0;
  return `${number.toFixed(digits)}${SPACE}%`;
}

export function micros(number) {
  if (!Number.isFinite(number) || number <= 0) return "–";
  if (number < 1e3) return `${number < 10 ? number.toFixed(1) : Math.round(number)}${SPACE}µs`;
  if (number < 1e6) return `${(number / 1e3).toFixed(number < 1e4 ? 1 : 0)}${SPACE}ms`;
  return `${(number / 1e6).toFixed(1)}${SPACE}s`;
}

export function span(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const s = Math.floor(seconds);
  if (seconds < 10) return `${seconds.toFixed(1)}${SPACE}s`;
  if (s < 60) return `${s}${SPACE}s`;
  if (s < 3600) return `${Math.floor(s / 60)}${SPACE}min ${s % 60}${SPACE}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}${SPACE}h ${Math.floor((s % 3600) / 60)}${SPACE}min`;
  return `${Math.floor(s / 86400)}${SPACE}d ${Math.floor((s % 86400) / 3600)}${SPACE}h`;
}

export function bytes(number) {
  if (!Number.isFinite(number)) return "–";
  for (const [limit, unit] of [[2 ** 10, "B"], [2 ** 20, "KiB"], [2 ** 30, "MiB"], [2 ** 40, "GiB"]]) {
    if (number < limit) {
      const part = number / (limit / 1024);
      return `${part < 10 && limit > 1024 ? part.toFixed(1) : Math.round(part)}${SPACE}${unit}`;
    }
  }
  return `${(number / 2 ** 40).toFixed(1)}${SPACE}TiB`;
}

export function clock(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString("en-GB", { hour12: false });
}

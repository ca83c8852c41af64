// Numbers in readable form, and elements with text.

const NONE = "–";
const grouped = new Intl.NumberFormat("en");

export const count = (number) => grouped.format(number);

export function seconds(value) {
  const [number, unit] = secondsParts(value);
  return unit ? `${number} ${unit}` : number;
}

export function secondsParts(value) {
  if (value === null || value === undefined) return [NONE, ""];
  if (value < 0.00995) return [(value * 1000).toFixed(1), "ms"];
  if (value < 1) return [(value * 1000).toFixed(0), "ms"];
  return [value < 100 ? value.toFixed(value < 10 ? 2 : 1) : value.toFixed(0), "s"];
}

export function bytes(number) {
  let unit = 0;
  for (; number >= 1024 && unit < 4; unit++) number /= 1024;
  return `${number < 10 && unit ? number.toFixed(1) : Math.round(number)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export function element(tag, text) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  return made;
}

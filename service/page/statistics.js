// Statistics of a tensor's values, their histogram, and bars for a vector.

import { h } from "./dom.js"
import { short } from "./numbers.js"
import { reduce } from "./reductions.js"

/** @typedef {import("./answers.js").Statistics} Statistics */

const SVG = "http://www.w3.org/2000/svg"
const HEIGHT = 56
const MOST_VALUES = 65536

/** @param {Statistics} found @param {string} title */
export function statisticsView(found, title) {
  const finite = found.min <= found.max // without finite values, they keep their initial ±Infinity
  /** @param {number} value */
  const ofFinite = (value) => (finite ? short(value) : "none")
  /** @type {Array<[string, string]>} */
  const rows = [
    ["Minimum", ofFinite(found.min)], ["Maximum", ofFinite(found.max)], ["Mean", ofFinite(found.mean)],
    ["Std deviation", ofFinite(found.deviation)], ["Zeros", `${(100 * found.zeros).toFixed(1)} %`],
    ["NaN or infinite", found.notFinite ? String(found.notFinite) : "none"],
  ]
  const numbers = h("dl", { class: "numbers" }, ...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))
  if (found.notFinite) numbers.classList.add("bad")
  return h("section", { "aria-label": title }, h("h3", {}, title), finite ? histogram(found) : null, numbers)
}

/** @param {Statistics} found */
function histogram({ counts, min, max, count }) {
  // On a square-root scale: the many zeros of a ReLU would flatten all else.
  const most = Math.sqrt(Math.max(...counts, 1))
  const bars = counts.map((number, i) => {
    const height = number ? Math.max(1, (Math.sqrt(number) / most) * HEIGHT) : 0
    return drawn("rect", { x: i, y: HEIGHT - height, width: 0.86, height })
  })
  const drawing = drawn("svg", {
    viewBox: `0 0 ${counts.length} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `Histogram of ${count} values from ${short(min)} to ${short(max)}`,
  })
  drawing.append(...bars)
  return h("figure", { class: "histogram" }, drawing,
    h("figcaption", {}, h("span", {}, short(min)), h("span", {}, "height: √count"), h("span", {}, short(max))))
}

/**
 * An output that is not a map: a vector's largest values.
 * @param {import("./answers.js").Answer} answer @param {string[]} names of the classes that the values may stand for
 * @param {string} of which of several outputs they are
 */
export async function valuesView({ slot, shape }, names = [], of = "") {
  if (shape.length !== 2) return h("p", { class: "note" }, `A tensor of shape ${shape.join(" × ")} is not a map over the image.`)
  return h("div", {}, h("h3", {}, `Largest values${of}`), bars(await reduce("values", { slot, most: MOST_VALUES }), names.length === shape[1] ? names : []))
}

/** The largest values, each with a bar from zero. @param {Float32Array} values @param {string[]} names @param {number} [most] */
function bars(values, names, most = 12) {
  const order = [...values.keys()].filter((i) => Number.isFinite(values[i])).sort((a, b) => values[b] - values[a]).slice(0, most)
  if (!order.length) return h("p", { class: "note" }, "None of its values is finite.")
  const low = Math.min(0, ...order.map((i) => values[i])), high = Math.max(0, ...order.map((i) => values[i]))
  return h("ol", { class: names.length ? "bars named plain-list" : "bars plain-list" }, ...order.map((i) => h("li", {},
    h("span", { class: "dim" }, String(i)), bar(values[i], low, high), h("span", {}, short(values[i])), names.length ? h("span", {}, names[i]) : null)))
}

/** A bar from zero to a value, on a scale from `low` to `high`. @param {number} value @param {number} low @param {number} high */
function bar(value, low, high) {
  const scale = 100 / (high - low || 1)
  const drawing = drawn("svg", { viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" })
  drawing.append(drawn("rect", { x: (Math.min(0, value) - low) * scale, y: 0, width: Math.abs(value) * scale, height: 1 }))
  if (value < 0) drawing.setAttribute("class", "negative")
  return drawing
}

/** An element of SVG. @param {string} tag @param {Record<string, string | number>} attributes */
function drawn(tag, attributes) {
  const element = document.createElementNS(SVG, tag)
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value))
  return element
}

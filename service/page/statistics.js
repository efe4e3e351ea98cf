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
  /** @type {Array<[string, string]>} */
  const rows = [
    ["Minimum", short(found.min)], ["Maximum", short(found.max)], ["Mean", short(found.mean)],
    ["Std deviation", short(found.deviation)], ["Zeros", `${(100 * found.zeros).toFixed(1)} %`],
    ["NaN or infinite", found.notFinite ? String(found.notFinite) : "none"],
  ]
  const numbers = h("dl", { class: "numbers" }, ...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))
  if (found.notFinite) numbers.classList.add("bad")
  return h("section", { "aria-label": title }, h("h3", {}, title), histogram(found), numbers)
}

/** @param {Statistics} found */
function histogram({ counts, min, max, count }) {
  // On a square-root scale: the many zeros of a ReLU would flatten all else.
  const most = Math.sqrt(Math.max(...counts, 1))
  const bars = counts.map((number, i) => {
    const bar = document.createElementNS(SVG, "rect")
    const height = number ? Math.max(1, (Math.sqrt(number) / most) * HEIGHT) : 0
    for (const [name, value] of Object.entries({ x: i, y: HEIGHT - height, width: 0.86, height })) bar.setAttribute(name, String(value))
    return bar
  })
  const drawing = document.createElementNS(SVG, "svg")
  drawing.setAttribute("viewBox", `0 0 ${counts.length} ${HEIGHT}`)
  drawing.setAttribute("preserveAspectRatio", "none")
  drawing.setAttribute("role", "img")
  drawing.setAttribute("aria-label", `Histogram of ${count} values from ${short(min)} to ${short(max)}`)
  drawing.append(...bars)
  return h("figure", { class: "histogram" }, /** @type {any} */ (drawing),
    h("figcaption", {}, h("span", {}, short(min)), h("span", {}, "height: √count"), h("span", {}, short(max))))
}

/** An output that is not a map: a vector's largest values. @param {import("./answers.js").Answer} answer */
export async function valuesView({ slot, shape }) {
  if (shape.length !== 2) return h("p", { class: "note" }, `A tensor of shape ${shape.join(" × ")} is not a map over the image.`)
  return h("div", {}, h("h3", {}, "Largest values"), bars(await reduce("values", { slot, most: MOST_VALUES })))
}

/** @param {Float32Array} values @param {number} most */
function bars(values, most = 12) {
  const order = [...values.keys()].sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, most)
  const largest = Math.abs(values[order[0]]) || 1
  return h("ol", { class: "bars plain-list" }, ...order.map((i) => {
    const bar = h("meter", { min: 0, max: largest, value: Math.abs(values[i]), "aria-label": `Value ${i}` })
    return h("li", {}, h("span", { class: "dim" }, String(i)), bar, h("span", {}, short(values[i])))
  }))
}

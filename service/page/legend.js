// The colours of a map, with the values at both ends and zero between them.

import { image } from "./colours.js"
import { h } from "./dom.js"
import { short } from "./numbers.js"
import { picture } from "./stage.js"

const WIDTH = 256

/** @param {import("./colours.js").Range} range */
export function legend({ low, high }) {
  if (low > high) return h("div", { class: "scale-bar" }, h("span", {}, "no finite value"))
  const values = Float32Array.from({ length: WIDTH }, (_, i) => low + ((high - low) * i) / (WIDTH - 1))
  const zero = h("span", { class: "zero" }, "0")
  const bar = picture(image(values, WIDTH, { low, high }))
  const scale = h("div", { class: "scale-bar", role: "img", "aria-label": `Colours from ${short(low)} to ${short(high)}` },
    bar, h("span", {}, short(low)), low < 0 && high > 0 ? zero : null, h("span", {}, short(high)))
  scale.style.setProperty("--zero", `${(100 * -low) / (high - low)}%`)
  return scale
}

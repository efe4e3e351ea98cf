// The photo as the model sees it, with a map over it, and the map's legend.

import { image } from "./colours.js"
import { h } from "./dom.js"
import { short } from "./numbers.js"
import { visibleRegion } from "./photo.js"

/** @typedef {import("./patch.js").Patch} Patch */
/** @typedef {import("./photo.js").Photo} Photo */

const SIDE = 640
const LEGEND = 256
/** By how much the exponent of the opacity grows towards the least values. */
const LEAST_SEEN = 1.2

/**
 * A canvas, and a function that paints a map and a patch's outline on it.
 * @param {Photo} photo
 * @param {any} preprocessing
 * @param {string} label
 */
export function stage({ bitmap }, preprocessing, label) {
  const part = bitmap ? visibleRegion(preprocessing, bitmap.width, bitmap.height) : { x: 0, y: 0, width: 1, height: 1 }
  const scale = SIDE / Math.max(part.width, part.height)
  const width = Math.max(1, Math.round(part.width * scale)), height = Math.max(1, Math.round(part.height * scale))
  const canvas = h("canvas", { class: "stage", width, height, role: "img", "aria-label": label })
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"))

  canvas.style.setProperty("--aspect", String(width / height))

  /**
   * Where little of the map is to be seen, more of the photo is, unless the opacity is 1.
   * @param {{image: ImageData, weights: Float32Array | null}} map @param {number} opacity 0 to 1 @param {Patch | null} patch
   */
  function paint({ image: map, weights }, opacity, patch) {
    context.clearRect(0, 0, width, height)
    context.filter = `grayscale(${opacity})` // its colours would be taken for the map's
    if (bitmap) context.drawImage(bitmap, -part.x * scale, -part.y * scale, bitmap.width * scale, bitmap.height * scale)
    context.filter = "none"
    const seen = new ImageData(new Uint8ClampedArray(map.data), map.width)
    for (let i = 0; i < seen.data.length / 4; i++)
      seen.data[4 * i + 3] *= opacity ** (weights ? 1 + LEAST_SEEN * (1 - weights[i]) : 1)
    context.imageSmoothingQuality = "high"
    context.drawImage(picture(seen), 0, 0, width, height)
    if (!patch) return
    const [w, h] = [width / map.width, height / map.height]
    for (const [line, colour] of /** @type {Array<[number, string]>} */ ([[5, "#000"], [2.5, "#fff"]])) {
      context.lineWidth = line
      context.strokeStyle = colour
      context.strokeRect(patch.column * w, patch.row * h, w, h)
    }
  }

  return { canvas, paint }
}

/**
 * A canvas of the image's own size.
 * @param {ImageData} pixels
 */
export function picture(pixels) {
  const canvas = h("canvas", { width: pixels.width, height: pixels.height })
  canvas.getContext("2d")?.putImageData(pixels, 0, 0)
  return canvas
}

/** The colours of a map, with the values at both ends and zero between them. @param {import("./colours.js").Range} range */
export function legend({ low, high }) {
  if (low > high) return h("div", { class: "scale-bar" }, h("span", {}, "no finite value"))
  const values = Float32Array.from({ length: LEGEND }, (_, i) => low + ((high - low) * i) / (LEGEND - 1))
  const zero = h("span", { class: "zero" }, "0")
  const bar = picture(image(values, LEGEND, { low, high }))
  const scale = h("div", { class: "scale-bar", role: "img", "aria-label": `Colours from ${short(low)} to ${short(high)}` },
    bar, h("span", {}, short(low)), low < 0 && high > 0 ? zero : null, h("span", {}, short(high)))
  scale.style.setProperty("--zero", `${(100 * -low) / (high - low)}%`)
  return scale
}

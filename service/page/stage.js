// The photo as the model sees it, with a map over it.

import { h } from "./dom.js"
import { seen } from "./photo.js"

/** @typedef {import("./answers.js").Answer} Answer */

const SIDE = 640

/**
 * @param {Answer} answer
 * @param {any} preprocessing
 * @param {ImageData | null} map
 * @param {number} opacity of the map, 0 to 1
 * @param {{row: number, column: number} | null} patch what is marked
 * @param {string} label
 */
export function stage(answer, preprocessing, map, opacity, patch, label) {
  const { bitmap } = answer.photo
  const part = bitmap ? seen(preprocessing, bitmap.width, bitmap.height) : { x: 0, y: 0, width: 1, height: 1 }
  const scale = SIDE / Math.max(part.width, part.height)
  const width = Math.max(1, Math.round(part.width * scale)), height = Math.max(1, Math.round(part.height * scale))
  const canvas = h("canvas", { class: "stage", width, height, role: "img", "aria-label": label })
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"))
  if (bitmap) context.drawImage(bitmap, -part.x * scale, -part.y * scale, bitmap.width * scale, bitmap.height * scale)
  if (!map) return canvas
  context.globalAlpha = opacity
  context.imageSmoothingQuality = "high"
  context.drawImage(picture(map), 0, 0, width, height)
  context.globalAlpha = 1
  if (patch) {
    const [w, h] = [width / map.width, height / map.height]
    context.lineWidth = 5
    context.strokeStyle = "#000"
    context.strokeRect(patch.column * w, patch.row * h, w, h)
    context.lineWidth = 2.5
    context.strokeStyle = "#fff"
    context.strokeRect(patch.column * w, patch.row * h, w, h)
  }
  return canvas
}

/**
 * A canvas of the image's own size.
 * @param {ImageData} image
 * @param {Record<string, any>} [attributes]
 */
export function picture(image, attributes = {}) {
  const canvas = h("canvas", { ...attributes, width: image.width, height: image.height })
  canvas.getContext("2d")?.putImageData(image, 0, 0)
  return canvas
}

/**
 * The place of a map under the pointer.
 * @param {PointerEvent} event
 * @param {{height: number, width: number}} maps
 */
export function patchUnder(event, maps) {
  const { clientWidth, clientHeight } = /** @type {HTMLElement} */ (event.currentTarget)
  /** @param {number} share @param {number} size */
  const index = (share, size) => Math.min(size - 1, Math.max(0, Math.floor(share * size)))
  return { row: index(event.offsetY / clientHeight, maps.height), column: index(event.offsetX / clientWidth, maps.width) }
}

// The size of the model's input, and how a photo comes to it.

import { h, select } from "./dom.js"

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./photo.js").Photo} Photo */
/** @typedef {Record<string, string>} Query of a request: `image_size` and `fit`, where they are not the default */

const MAX_SIDE = 4096 // of `image_size`
const SIZES = [160, 224, 320, 448, 512, 640]
/** @type {Array<[string, string]>} */
const FITS = [["", "cropped"], ["stretch", "stretched"], ["pad", "padded"], ["native", "whole, as it is"]]

/** What a place asks of every request. @param {import("./place.js").Place} place @returns {Query} */
export function sizeQuery({ z, f }) {
  return { ...(z ? { image_size: z } : {}), ...(f ? { fit: f } : {}) }
}

/**
 * The choices, for models whose weights crop photos to a size; else nothing.
 * @param {Model} model @param {import("./place.js").Place} place
 * @param {(changes: Record<string, string | number | null>) => void} go
 */
export function sizeChoices(model, place, go) {
  if (!model.preprocessing?.crop_size) return ""
  const fitting = SIZES.map((size) => String(Math.round(size / model.multiple) * model.multiple))
  const sizes = [...new Set([...fitting, ...(place.z ? [place.z] : [])])].sort((a, b) => parseInt(a) - parseInt(b))
  /** @param {string} name */
  const change = (name) => (/** @type {string} */ value) => go({ [name]: value || null, at: null })
  return h("div", { class: "row dim sizes" },
    h("label", {}, "Size ", select("Size", [["", `${usualSide(model)} pixels`], ...sizes.map((size) => /** @type {[string, string]} */ ([size, `${size} pixels`]))], place.z ?? "", change("z"))),
    h("label", {}, "Photo ", select("Fit", FITS, place.f ?? "", change("f"))))
}

/** The preprocessing as the query changes it. @param {Model} model @param {Query} query */
export function preprocessingAt(model, { image_size: asked, fit }) {
  if (!fit) return model.preprocessing // of a square it shows the same part of the photo at every size
  const size = asked ? sides(asked) : usualSize(model)
  return { ...model.preprocessing, resize_size: fit === "native" ? null : size, crop_size: null, fit }
}

/** Height and width of the input for a photo; null where that is not known here. @param {Model} model @param {Query} query @param {Photo} photo @returns {[number, number] | null} */
function inputSize(model, { image_size: asked, fit }, { bitmap }) {
  const size = asked ? sides(asked) : usualSize(model)
  if (fit !== "native") return size
  if (!bitmap) return null
  const scale = Math.min(...size) / Math.min(bitmap.width, bitmap.height)
  const rounded = (/** @type {number} */ side) => Math.max(1, halfToEven((side * scale) / model.multiple)) * model.multiple
  return [rounded(bitmap.height), rounded(bitmap.width)]
}

/** How many times as large as usual the input for a photo is. @param {Model} model @param {Query} query @param {Photo} photo */
export function enlargement(model, query, photo) {
  const size = inputSize(model, query, photo) ?? usualSize(model), usual = usualSize(model)
  return (size[0] * size[1]) / (usual[0] * usual[1])
}

/** The nearest whole number, of halves the even one: as the server rounds sizes. @param {number} value */
function halfToEven(value) {
  const nearest = Math.round(value)
  return nearest - value === 0.5 && nearest % 2 ? nearest - 1 : nearest
}

/**
 * The same input by a query of one size, which extractors tell the grids of; of a larger one the query itself, which the
 * server refuses with what would be right.
 * @param {Model} model @param {Query} query @param {Photo} photo @returns {Query}
 */
export function fixedQuery(model, query, photo) {
  const size = query.fit === "native" ? inputSize(model, query, photo) : null
  return size && Math.max(...size) <= MAX_SIDE ? { fit: "stretch", image_size: size.join("x") } : query
}

/**
 * The grid of a node's tokens for a photo, which is told for the usual size.
 * @param {Model} model @param {import("./maps.js").Grid | null} grid @param {Query} query @param {Photo} photo
 */
export function gridAt(model, grid, query, photo) {
  if (!grid || !(query.image_size || query.fit)) return grid
  const size = inputSize(model, query, photo)
  const usual = usualSize(model)
  return size && { ...grid, height: Math.round((grid.height * size[0]) / usual[0]), width: Math.round((grid.width * size[1]) / usual[1]) }
}

/** @param {Model} model @returns {[number, number]} */
function usualSize(model) {
  const [height, width] = model.inputs[0].shape.slice(-2)
  return [height ?? 224, width ?? 224]
}

/** @param {Model} model */
const usualSide = (model) => Math.min(...usualSize(model))

/** @param {string} text `448` or `448x672` @returns {[number, number]} */
function sides(text) {
  const [height, width] = text.split("x").map(Number)
  return [height, width ?? height]
}

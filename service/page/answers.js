// A node's output for a photo: requested from the service, held by the worker.

import { ask, modelPath } from "./api.js"
import { reduce } from "./reductions.js"

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./photo.js").Photo} Photo */

/**
 * @typedef {object} Statistics
 * @property {number} count
 * @property {number} min
 * @property {number} max
 * @property {number} mean
 * @property {number} deviation
 * @property {number} zeros share of all values
 * @property {number} notFinite
 * @property {number[]} counts
 */

/**
 * @typedef {object} Answer
 * @property {string} slot its key in the worker
 * @property {Photo} photo
 * @property {string} node as requested
 * @property {Blob} file the answer's bytes
 * @property {string} timing
 * @property {number[]} shape
 * @property {Statistics} statistics
 * @property {{channels: number, height: number, width: number} | null} maps
 * @property {number[]} [order] channels, the strongest first
 * @property {Float32Array} [strength]
 */

/** @param {Model} model @param {string} name */
export function featureRequest(model, name) {
  return { path: modelPath(model.name, "/features"), query: { nodes: name, weights: model.weights } }
}

/** @param {Model} model @param {string} name @param {Photo} photo @param {string} accept @param {AbortSignal} [signal] */
export async function askFeatures(model, name, photo, accept, signal) {
  const { path, query } = featureRequest(model, name)
  const headers = { Accept: accept, "Content-Type": photo.type }
  return ask(`${path}?${new URLSearchParams(query)}`, { method: "POST", headers, body: photo.data, signal })
}

/**
 * @param {Model} model @param {string} name @param {Photo} photo @param {string} slot @param {AbortSignal} signal
 * @returns {Promise<Answer>}
 */
export async function features(model, name, photo, slot, signal) {
  const answer = await askFeatures(model, name, photo, "application/x-safetensors", signal)
  const node = model.resolve(name)
  // Windows of attention are rows of their own, not maps of the image.
  const layout = node && node.rows_per_image === 1 ? node.layout : null
  return opened(answer, { slot, key: name, layout, tokens: node?.tokens ?? null }, photo, name)
}

/**
 * Hand an answer in safetensors to the worker.
 * @param {Response} answer @param {{slot: string, key: string, layout: string | null, tokens: import("./maps.js").Grid | null}} message
 * @param {Photo} photo @param {string} node
 * @returns {Promise<Answer>}
 */
export async function opened(answer, message, photo, node) {
  const buffer = await answer.arrayBuffer()
  const file = new Blob([buffer])
  const timing = answer.headers.get("Server-Timing") ?? ""
  const found = await reduce("open", { ...message, buffer }, [buffer])
  return { slot: message.slot, photo, node, file, timing, ...found }
}

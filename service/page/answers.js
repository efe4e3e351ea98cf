// A node's output for a photo: requested from the service, held by the worker.

import { ask } from "./api.js"
import { editedBody } from "./edits.js"
import { onLoss, reduce } from "./reductions.js"
import { gridAt } from "./size.js"
import { featureAddress, requestOf } from "./snippets.js"

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
 * @property {Model} model
 * @property {Photo} photo
 * @property {string} node as requested
 * @property {import("./edits.js").Edit[]} edits that it was computed with
 * @property {Blob} file the answer's bytes
 * @property {string} timing
 * @property {number[]} shape
 * @property {Statistics} statistics
 * @property {{channels: number, height: number, width: number} | null} maps
 * @property {Float32Array} [strength] mean magnitude of each channel
 * @property {Float32Array} [variation] standard deviation of each channel over its positions
 */

/** @param {import("./snippets.js").Request} request @param {Photo} photo @param {string} accept @param {AbortSignal} [signal] */
export async function askFeatures(request, photo, accept, signal) {
  const { path, query } = featureAddress(request)
  const { edits } = request
  const headers = { Accept: accept, "Content-Type": edits.length ? "application/json" : photo.type }
  const body = edits.length ? await editedBody(photo, edits) : photo.data
  return ask(`${path}?${new URLSearchParams(query)}`, { method: "POST", headers, body, signal })
}

/**
 * A node's output for a photo, from memory where it was asked for before.
 * @param {Model} model @param {string} name @param {Photo} photo @param {AbortSignal} signal
 * @param {import("./size.js").Query} [query]
 * @param {import("./edits.js").Edit[]} [edits]
 * @returns {Promise<Answer>}
 */
export async function features(model, name, photo, signal, query = {}, edits = []) {
  const what = [model.name, model.weights, name, query.image_size, query.fit, JSON.stringify(edits)].join("\n")
  const known = kept(what, photo, signal)
  if (known) return known
  const request = requestOf(model, [name], photo, { query, edits })
  const answer = await askFeatures(request, photo, "application/x-safetensors", signal)
  const node = model.resolve(name)
  // Windows of attention are rows of their own, not maps of the image.
  const layout = node && node.rows_per_image === 1 ? node.layout : null
  return opened(model, answer, { key: name, layout, tokens: gridAt(model, node?.tokens ?? null, query, photo) }, photo, name, what, signal, edits)
}

/**
 * Hand an answer in safetensors to the worker, and keep it.
 * @param {Model} model that gave it @param {Response} answer @param {{key: string, layout: string | null, tokens: import("./maps.js").Grid | null}} message
 * @param {Photo} photo @param {string} node @param {string} what it is an answer to, beside the photo
 * @param {AbortSignal} signal aborted once it is no longer shown
 * @param {import("./edits.js").Edit[]} [edits]
 * @returns {Promise<Answer>}
 */
export async function opened(model, answer, message, photo, node, what, signal, edits = []) {
  const buffer = await answer.arrayBuffer()
  const file = new Blob([buffer])
  const timing = answer.headers.get("Server-Timing") ?? ""
  const slot = String(++slots)
  const found = /** @type {Answer} */ ({ slot, model, photo, node, edits, file, timing, ...await reduce("open", { slot, ...message, buffer }, { transfer: [buffer] }) })
  keep(what, found, signal)
  return found
}

/** Answers that stay, the last used ones last; the worker holds their tensors. @type {Map<Answer, {what: string, signal: AbortSignal}>} */
const known = new Map()
onLoss(() => known.clear())
/** The bytes that they may take, unless what is shown takes more. */
const MOST_BYTES = 256e6
let slots = 0

/** A kept answer. @param {string} what @param {Photo} photo @param {AbortSignal} signal aborted once it is no longer shown */
export function kept(what, photo, signal) {
  signal.throwIfAborted()
  const found = [...known.keys()].find((answer) => answer.photo === photo && known.get(answer)?.what === what)
  if (found) keep(what, found, signal)
  return found
}

/** @param {string} what @param {Answer} answer @param {AbortSignal} signal */
function keep(what, answer, signal) {
  known.delete(answer)
  known.set(answer, { what, signal })
  let bytes = 0
  for (const [other, { signal }] of [...known].reverse()) {
    bytes += other.file.size
    if (!signal.aborted || bytes <= MOST_BYTES) continue
    known.delete(other)
    reduce("close", { slot: other.slot }).catch(() => {})
  }
}

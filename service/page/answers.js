// What a node makes of a photo: asked of the service, held by the worker.

import { ask, askJson, modelPath } from "./api.js"
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
 * @property {string} slot what the worker holds it under
 * @property {Photo} photo
 * @property {string} node the name asked for
 * @property {Blob} file as it came
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
  // Windows of attention are rows of their own, and no map of the image.
  const layout = node && node.rows_per_image === 1 ? node.layout : null
  return opened(answer, { slot, key: name, layout, tokens: node?.tokens ?? null }, photo, name)
}

/** @param {Response} answer @param {{slot: string, key: string, layout: string | null, tokens: import("./maps.js").Grid | null}} message @param {Photo} photo @param {string} node */
async function opened(answer, message, photo, node) {
  const buffer = await answer.arrayBuffer()
  const file = new Blob([buffer])
  const timing = answer.headers.get("Server-Timing") ?? ""
  const found = await reduce("open", { ...message, buffer }, [buffer])
  return { slot: message.slot, photo, node, file, timing, ...found }
}

/** Make an extractor of one node. @param {Model} model @param {string} node @param {string[]} [transforms] @param {AbortSignal} [signal] */
export function makeExtractor(model, node, transforms = [], signal = undefined) {
  const spec = { model: model.name, weights: model.weights, return_nodes: [node], transforms }
  return askJson("v1/extractors", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(spec), signal,
  })
}

/** What has been asked of a model's attention. @type {WeakMap<Model, {nodes?: Promise<{names: string[], order: string[]}>, asked?: string, photo?: Photo, answer?: Attention}>} */
const attentions = new WeakMap()

/** @param {Model} model */
function attentionOf(model) {
  const known = attentions.get(model) ?? {}
  attentions.set(model, known)
  return known
}

/**
 * The nodes of attention weights that a pass brings, and all nodes with them, in order of execution. Asked once a
 * model, for whoever asks next as well: it cannot be stopped.
 * @param {Model} model
 */
export function attentionNodes(model) {
  const known = attentionOf(model)
  const path = modelPath(model.name, "/nodes", { weights: model.weights, transforms: "attention_maps" })
  known.nodes ??= askJson(path).then(
    ({ eval_nodes: order }) => ({ names: order.filter((/** @type {string} */ name) => !model.byName.has(name)), order }),
    (error) => { known.nodes = undefined; throw error })
  return known.nodes
}

/** @typedef {{shape: number[], grid: import("./attended.js").Grid | null}} Attention */

/**
 * The attention weights of a photo, held by the worker as `attention`; kept until another node's are asked for.
 * @param {Model} model @param {string} name @param {Photo} photo @param {AbortSignal} signal
 * @returns {Promise<Attention>}
 */
export async function attention(model, name, photo, signal) {
  const known = attentionOf(model)
  if (known.answer && known.asked === name && known.photo === photo) return known.answer
  const { id } = await makeExtractor(model, name, ["attention_maps"], signal)
  const headers = { Accept: "application/x-safetensors", "Content-Type": photo.type }
  const answer = await ask(`v1/extractors/${id}/features`, { method: "POST", headers, body: photo.data, signal })
  const { shape } = await opened(answer, { slot: "attention", key: name, layout: null, tokens: null }, photo, name)
  // Asked now: an extractor that is still being built knows nothing of its outputs yet.
  const { outputs } = await askJson(`v1/extractors/${id}`, { signal })
  const found = { shape, grid: outputs[0].attention }
  Object.assign(known, { asked: name, photo, answer: found })
  return found
}

/** Milliseconds of each node on a photograph. @param {Model} model @param {AbortSignal} signal */
export async function measured(model, signal) {
  const last = model.nodes.findLast((node) => node.extractable)
  const { id } = await makeExtractor(model, last?.name ?? "", [], signal)
  const { profile } = await askJson(`v1/extractors/${id}/graph?profile=true`, { signal })
  return new Map(profile.nodes.map((/** @type {any} */ node) => [node.name, node.milliseconds]))
}

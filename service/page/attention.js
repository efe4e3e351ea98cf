// The attention view: the weights of each head from one position to all others.

import { opened } from "./answers.js"
import { ask, askJson, modelPath } from "./api.js"
import { h, select } from "./dom.js"
import { makeExtractor } from "./extractors.js"
import { modulesAbove } from "./model.js"
import { reduce } from "./reductions.js"
import { coloured } from "./views.js"

/** @typedef {import("./answers.js").Answer} Answer */
/** @typedef {import("./attended.js").Grid} Grid */
/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./stages.js").Side} Side */

/** @typedef {{names: string[], order: string[]}} Nodes nodes of attention weights, and all nodes in order of execution */
/** @typedef {{shape: number[], grid: Grid | null}} Weights held by the worker */

/** @type {WeakMap<Model, Promise<Nodes>>} */
const nodes = new WeakMap()
/** Weights that the worker holds, by slot. @type {Map<string, {model: Model, node: string, photo: import("./photo.js").Photo, weights: Weights}>} */
const held = new Map()

/**
 * Cached for each model, so it takes no signal: others may wait for the same answer.
 * @param {Model} model
 */
export function attentionNodes(model) {
  let found = nodes.get(model)
  if (!found) {
    found = askJson(modelPath(model.name, "/nodes", { weights: model.weights, transforms: "attention_maps" })).then(
      ({ eval_nodes: order }) => ({ names: order.filter((/** @type {string} */ name) => !model.byName.has(name)), order }))
    found.catch(() => nodes.delete(model))
    nodes.set(model, found)
  }
  return found
}

/**
 * The attention nearest to a node: of the same block, else the last before it, else the first.
 * @param {Model} model @param {string} name
 * @returns {Promise<string | null>}
 */
async function attentionNear(model, name) {
  const { names, order } = await attentionNodes(model)
  const here = modulesAbove(name)
  /** @param {string} other */
  const shared = (other) => modulesAbove(other).filter((module) => here.includes(module)).length
  const at = order.indexOf(name)
  const before = names.filter((other) => order.indexOf(other) <= at)
  const most = Math.max(...names.map(shared))
  const block = names.filter((other) => shared(other) === most)
  if (block.length === 1 || !before.length) return block[0] ?? null
  return before[before.length - 1]
}

/**
 * The attention weights of an answer's photo.
 * @param {Model} model @param {string} node @param {Answer} answer @param {string} slot @param {AbortSignal} signal
 * @returns {Promise<Weights>}
 */
async function weightsOf(model, node, { photo }, slot, signal) {
  const last = held.get(slot)
  if (last?.model === model && last.node === node && last.photo === photo) return last.weights
  const { id } = await makeExtractor(model, node, ["attention_maps"], signal)
  const headers = { Accept: "application/x-safetensors", "Content-Type": photo.type }
  const answer = await ask(`v1/extractors/${id}/features`, { method: "POST", headers, body: photo.data, signal })
  const { shape } = await opened(answer, { slot, key: node, layout: null, tokens: null }, photo, node)
  // Not before: an extractor that is still building lists no outputs.
  const { outputs } = await askJson(`v1/extractors/${id}`, { signal })
  const weights = { shape, grid: outputs[0].attention }
  held.set(slot, { model, node, photo, weights })
  return weights
}

/**
 * The maps of attention, and the choice of a head.
 * @param {Model} model @param {Answer[]} answers @param {number | null} head the mean of all where that is null
 * @param {(head: string) => void} choose
 * @param {AbortSignal} signal
 * @returns {Promise<{sides: Side[], choice: HTMLElement | string}>}
 */
export async function attentionView(model, answers, head, choose, signal) {
  let most = 0
  const sides = await Promise.all(answers.map(async (answer) => {
    const node = await attentionNear(model, model.resolve(answer.node)?.name ?? answer.node)
    if (!node) return { note: "This model has no attention." }
    const slot = `attention ${answer.slot}`
    const { shape, grid } = await weightsOf(model, node, answer, slot, signal)
    if (!grid) return { note: `The attention of ${node}, ${shape.join(" × ")}, has no known grid of positions.` }
    const heads = shape[shape.length - 3]
    most = Math.max(most, heads)
    const own = head !== null && head < heads ? head : null
    const label = own === null ? "Mean of all heads" : `Head ${own}`
    return {
      photo: answer.photo, node, label, caption: `${label} of ${node}`, size: grid, query: true,
      render: async (/** @type {import("./patch.js").Patch | null} */ patch) =>
        coloured(await reduce("attention", { slot, head: own, grid, ...patch }), grid.width),
    }
  }))
  const heads = /** @type {Array<[string, string]>} */ ([["", "Mean of all heads"], ...[...Array(most).keys()].map((i) => [String(i), `Head ${i}`])])
  const choice = most ? h("label", { class: "row dim" }, "Head", select("Head", heads, head !== null && head < most ? String(head) : "", choose)) : ""
  return { sides, choice }
}

// The attention view: the weights of each head from one position to all others.

import { askFeatures, kept, opened } from "./answers.js"
import { askJson, modelPath } from "./api.js"
import { h, select } from "./dom.js"
import { reaching } from "./edits.js"
import { makeExtractor } from "./extractors.js"
import { modulesAbove } from "./model.js"
import { reduce } from "./reductions.js"
import { fixedQuery } from "./size.js"
import { requestOf } from "./snippets.js"
import { coloured } from "./views.js"

/** @typedef {import("./answers.js").Answer} Answer */
/** @typedef {import("./attended.js").Grid} Grid */
/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./stages.js").Side} Side */

/** @typedef {{names: string[], order: string[]}} Nodes nodes of attention weights, and all nodes in order of execution */
/** @typedef {{answer: Answer, grid: Grid | null, id: string}} Weights held by the worker, and the extractor that gives them */

/** @type {WeakMap<Model, Promise<Nodes>>} */
const nodes = new WeakMap()

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

/** The node that computes with some attention weights: the one before them. @param {Model} model @param {string} weights */
async function callOf(model, weights) {
  const { order } = await attentionNodes(model)
  return order[order.indexOf(weights) - 1]
}

/**
 * What a head alone writes: its channels before the projection of all heads; null where that is inside one node.
 * @param {Model} model @param {string} node of attention weights @param {number} head @param {number} heads
 * @returns {import("./edits.js").Knob | null}
 */
export function headKnob(model, node, head, heads) {
  const inputs = model.byName.get(`${modulesAbove(node).at(-1)}.proj`)?.args ?? []
  const input = model.byName.get(inputs[0])
  const width = (input?.shape?.at(-1) ?? 0) / heads
  if (!input || !width || !Number.isInteger(width)) return null
  return { text: `Head ${head}`, edit: { node: input.name, channels: [...Array(width).keys()].map((i) => head * width + i) } }
}

/**
 * The attention weights of an answer's photo.
 * @param {Model} model @param {string} node @param {Answer} answer @param {AbortSignal} signal @param {import("./size.js").Query} query
 * @returns {Promise<Weights>}
 */
async function weightsOf(model, node, { photo, edits: all }, signal, query) {
  const edits = reaching(all, model, await callOf(model, node)).filter(({ node: at }) => !model.resolve(at)?.name.endsWith("scaled_dot_product_attention"))
  const { id } = await makeExtractor(model, { nodes: [node], transforms: ["attention_maps"], query: fixedQuery(model, query, photo) }, signal)
  const what = id + JSON.stringify(edits)
  let found = kept(what, photo)
  if (!found) {
    const request = requestOf(model, [node], photo, { transforms: ["attention_maps"], id, edits })
    const answer = await askFeatures(request, photo, "application/x-safetensors", signal)
    found = await opened(answer, { key: node, layout: null, tokens: null }, photo, node, what, edits)
  }
  // Not before: an extractor that is still building lists no outputs.
  const { outputs } = await askJson(`v1/extractors/${id}`, { signal })
  return { answer: found, grid: outputs[0].attention, id }
}

/**
 * The maps of attention, and the choice of a head.
 * @param {Model} model @param {Answer[]} answers @param {number | null} head the mean of all where that is null
 * @param {(head: string) => void} choose
 * @param {AbortSignal} signal @param {import("./size.js").Query} query
 * @returns {Promise<{sides: Side[], choice: HTMLElement | string, weights: Weights[]}>}
 */
export async function attentionView(model, answers, head, choose, signal, query) {
  let most = 0
  /** @type {Weights[]} */ const found = []
  const sides = await Promise.all(answers.map(async (answer, i) => {
    const node = await attentionNear(model, model.resolve(answer.node)?.name ?? answer.node)
    if (!node) return { note: "This model has no attention." }
    const { answer: { slot, shape }, grid } = (found[i] = await weightsOf(model, node, answer, signal, query))
    if (!grid) return { note: `The attention of ${node}, ${shape.join(" × ")}, has no known grid of positions.` }
    const heads = shape[shape.length - 3]
    most = Math.max(most, heads)
    const own = head !== null && head < heads ? head : null
    const label = own === null ? "Mean of all heads" : `Head ${own}`
    return {
      photo: answer.photo, edited: answer.edits.length > 0, node, label, caption: `${label} of ${node}`, size: grid, query: true,
      render: async (/** @type {import("./patch.js").Patch | null} */ patch, /** @type {string} */ topic) => coloured(await reduce("attention", { slot, head: own, grid, ...patch }, { topic }), grid.width),
    }
  }))
  const heads = /** @type {Array<[string, string]>} */ ([["", "Mean of all heads"], ...[...Array(most).keys()].map((i) => [String(i), `Head ${i}`])])
  const choice = most ? h("label", { class: "row dim" }, "Head", select("Head", heads, head !== null && head < most ? String(head) : "", choose)) : ""
  return { sides, choice, weights: found.filter(Boolean) }
}

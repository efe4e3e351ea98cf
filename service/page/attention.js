// The attention view: the weights of each head from one position to all others.

import { askFeatures, kept, opened } from "./answers.js"
import { askJson, modelPath } from "./api.js"
import { image, range } from "./colours.js"
import { h, select } from "./dom.js"
import { reaching } from "./edits.js"
import { makeExtractor } from "./extractors.js"
import { holds, modulesAbove } from "./model.js"
import { patchAlike, patchOf } from "./patch.js"
import { reduce } from "./reductions.js"
import { fixedQuery } from "./size.js"
import { requestOf } from "./snippets.js"
import { picture } from "./stage.js"
import { coloured } from "./views.js"

/** @typedef {import("./answers.js").Answer} Answer */
/** @typedef {import("./attended.js").Grid} Grid */
/** @typedef {import("./edits.js").Edit} Edit */
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
 * @param {Model} model @param {string} node of attention weights @param {import("./place.js").Place} place @param {number} heads
 * @returns {import("./edits.js").Knob | null}
 */
export function headKnob(model, node, place, heads) {
  const head = headOf(place, heads)
  const inputs = model.byName.get(`${modulesAbove(node).at(-1)}.proj`)?.args ?? []
  const input = model.byName.get(inputs[0])
  const width = (input?.shape?.at(-1) ?? 0) / heads
  if (head === null || !input || !width || !Number.isInteger(width)) return null
  return { text: `Head ${head}`, edit: { node: input.name, channels: [...Array(width).keys()].map((i) => head * width + i) } }
}

/** Those edits that change some attention weights: not those of the call's result, unless it is the weights. @param {Edit[]} all @param {Model} model @param {string} weights */
async function editsBefore(all, model, weights) {
  const call = await callOf(model, weights)
  const { target, module_type } = model.byName.get(call) ?? {}
  const itself = /softmax/i.test(`${target} ${module_type}`)
  return reaching(all, model, call).filter(({ node }) => itself || model.resolve(node)?.name !== call)
}

/**
 * The attention weights of a photo.
 * @param {Model} model @param {string} node @param {import("./photo.js").Photo} photo @param {Edit[]} edits @param {AbortSignal} signal
 * @param {import("./size.js").Query} query
 * @returns {Promise<Weights>}
 */
async function weightsOf(model, node, photo, edits, signal, query) {
  const { id } = await makeExtractor(model, { nodes: [node], transforms: ["attention_maps"], query: fixedQuery(model, query, photo) }, signal)
  const what = id + JSON.stringify(edits)
  let found = kept(what, photo, signal)
  if (!found) {
    const request = requestOf(model, [node], photo, { transforms: ["attention_maps"], id, edits })
    const answer = await askFeatures(request, photo, "application/x-safetensors", signal)
    found = await opened(answer, { key: node, layout: null, tokens: null }, photo, node, what, signal, edits)
  }
  // Not before: an extractor that is still building lists no outputs.
  const { outputs } = await askJson(`v1/extractors/${id}`, { signal })
  return { answer: found, grid: outputs[0].attention, id }
}

/**
 * The maps of attention of a position or of a token before the grid, and the choices of them.
 * @param {Model} model @param {Answer[]} answers @param {import("./place.js").Place} place
 * @param {(changes: Record<string, string | null>, replace?: boolean) => void} go
 * @param {AbortSignal} signal @param {import("./size.js").Query} query
 * @returns {Promise<{sides: Side[], choices: HTMLElement[], weights: Weights[]}>}
 */
export async function attentionView(model, answers, place, go, signal, query) {
  /** @type {Weights[]} */ const found = []
  const sides = await Promise.all(answers.map(async (answer, i) => {
    const node = await attentionNear(model, model.resolve(answer.node)?.name ?? answer.node)
    if (!node) return { note: "This model has no attention." }
    const edits = await editsBefore(answer.edits, model, node)
    if (answer.edits.length && !edits.length) return { note: `No edit changes the weights of ${node}; those after it may differ.` }
    const { answer: { shape, slot }, grid } = (found[i] = await weightsOf(model, node, answer.photo, edits, signal, query))
    if (!grid) return { note: `The attention of ${node}, ${shape.join(" × ")}, has no known grid of positions.` }
    const own = headOf(place, shape[shape.length - 3])
    const token = tokenOf(place, grid)
    const label = own === null ? "Mean of all heads" : `Head ${own}`
    return {
      photo: answer.photo, edited: answer.edits.length > 0, node, label, caption: `${label} of ${node}`, size: grid, query: token === null,
      render: async (/** @type {import("./patch.js").Patch | null} */ patch, /** @type {string} */ topic) => {
        const others = found.flatMap(({ answer: { slot, shape }, grid: to }) => (to
          ? { slot, head: headOf(place, shape[shape.length - 3]), grid: to, token: tokenOf(place, to), ...(patch && patchAlike(patch, grid, to)) } : []))
        const all = await Promise.all(others.map((other, k) => reduce("attention", other, { topic: `${topic}, ${k}` })))
        return coloured(all[others.findIndex((other) => other.slot === slot)], grid.width, range(...all))
      },
    }
  }))
  const weights = found.filter(Boolean)
  return { sides, choices: weights[0] ? await choicesOf(model, weights[0], place, go) : [], weights }
}

/** The chosen head; null for the mean of all, and where there is none of that number. @param {import("./place.js").Place} place @param {number} heads */
function headOf({ head }, heads) {
  const number = Number(head)
  return head && Number.isInteger(number) && number >= 0 && number < heads ? number : null
}

/** The token before the grid that attends; null for a position. @param {import("./place.js").Place} place @param {Grid} grid */
function tokenOf({ q }, { prefix }) {
  return q !== undefined && Number(q) < prefix ? Number(q) : null
}

/**
 * Which block, what attends, and by which head, of which each is a tile.
 * @param {Model} model @param {Weights} weights @param {import("./place.js").Place} place
 * @param {(changes: Record<string, string | null>, replace?: boolean) => void} go
 */
async function choicesOf(model, { answer: { node, slot, shape }, grid }, place, go) {
  const { names } = await attentionNodes(model)
  const at = names.indexOf(node)
  /** @param {string} text @param {string} label @param {number} step */
  const step = (text, label, step) => h("button", { type: "button", "aria-label": label, disabled: !names[at + step],
    onclick: () => go({ n: blockOf(names, names[at + step]), ch: null }) }, text)
  const blocks = h("div", { class: "row dim" }, step("‹", "The attention before", -1), `${at + 1} of ${names.length}`, step("›", "The attention after", 1))
  if (!grid) return [blocks]
  const heads = [...Array(shape[shape.length - 3]).keys()].map(String)
  const token = tokenOf(place, grid)
  const tokens = [...Array(grid.prefix).keys()].map((i) => /** @type {[string, string]} */ ([String(i), i ? `token ${i}` : "class token"]))
  if (tokens.length) blocks.append(h("label", {}, "From ", select("What attends", [["", "position"], ...tokens], token === null ? "" : String(token), (q) => go({ q: q || null }, true))))
  const chosen = heads.includes(place.head) ? place.head : ""
  blocks.append(h("label", {}, "Head ", select("Head", [["", "Mean of all heads"], ...heads.map((i) => /** @type {[string, string]} */ ([i, `Head ${i}`]))], chosen, (head) => go({ head: head || null }, true))))
  /** @type {{entropy: number, values: Float32Array}[]} */
  const found = await reduce("heads", { slot, grid, token, ...patchOf(place.at, grid) })
  const tiles = found.map(({ entropy, values }, i) => h("button", {
    type: "button", class: "tile", "data-head": i, "aria-pressed": String(chosen === String(i)), "aria-label": `Head ${i}, entropy ${entropy.toFixed(1)} bits`,
    onclick: () => go({ head: String(i) }, true),
  }, picture(image(values, grid.width, range(values))), h("span", {}, `${i}: ${entropy.toFixed(1)} bits`)))
  return [blocks, h("div", {}, h("div", { class: "grid heads", role: "group", "aria-label": "Heads" }, ...tiles))]
}

/** The largest module that has no attention but this one. @param {string[]} names @param {string} node */
function blockOf(names, node) {
  return modulesAbove(node).find((path) => names.filter((other) => holds(path, other)).length === 1) ?? node
}

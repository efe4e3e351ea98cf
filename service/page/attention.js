// The attention view: the weights of each head from one position to all others.

import { askFeatures, kept, opened } from "./answers.js"
import { askJson, modelPath } from "./api.js"
import { queryAt } from "./attended.js"
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
import { eachSide } from "./stages.js"
import { coloured } from "./views.js"

/** @typedef {import("./answers.js").Answer} Answer */
/** @typedef {import("./attended.js").Grid} Grid */
/** @typedef {import("./edits.js").Edit} Edit */
/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./stages.js").Side} Side */

/** @typedef {{names: string[], order: string[]}} Nodes nodes of attention weights, and all nodes in order of execution */
/**
 * Weights held by the worker.
 * @typedef {object} Weights
 * @property {Answer} answer those shown first
 * @property {Patch | null} first the position whose weights these are; null where they are those of all
 * @property {Patch | null} patch the chosen position
 * @property {Grid | null} grid
 * @property {import("./snippets.js").Request} request that gives them
 * @property {(patch: Patch) => Promise<Answer>} row those of another position
 * @property {() => Promise<any>} idle once all that were asked for have come
 */
/** @typedef {import("./patch.js").Patch} Patch */

const TRANSFORMS = ["attention_maps"]
/** Weights of more bytes are asked for one query at a time: those of 1370 tokens and 6 heads are 45 MB, and a query's 33 kB. */
const MOST_BYTES = 4e6
/** How long the pointer rests on a position before the weights of its query are asked for, in milliseconds. */
const REST = 200

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

/** The extractor of the weights nearest to an answer; why not, where there are none. @param {Answer} answer @param {AbortSignal} signal @param {import("./size.js").Query} query */
async function extractorOf({ model, node: name, photo, edits: all }, signal, query) {
  const node = await attentionNear(model, model.resolve(name)?.name ?? name)
  if (!node) return { note: `${model.name} has no attention.` }
  const edits = await editsBefore(all, model, node)
  if (all.length && !edits.length) return { note: `No edit changes the weights of ${node}; those after it may differ.` }
  let made
  do made = await makeExtractor(model, { nodes: [node], transforms: TRANSFORMS, query: fixedQuery(model, query, photo) }, signal)
  while (made.state === "building") // which lists no outputs
  return { node, edits, id: made.id, grid: /** @type {Grid | null} */ (made.outputs[0].attention), bytes: made.outputs[0].bytes_per_image }
}

/**
 * The attention weights of a photo: all of them, or where those are many the ones of a single query.
 * @param {Answer} of @param {Exclude<Awaited<ReturnType<typeof extractorOf>>, {note: string}>} made @param {Patch | null} patch the chosen position
 * @param {import("./place.js").Place} place @param {AbortSignal} signal @param {import("./size.js").Query} query
 * @returns {Promise<Weights>}
 */
async function weightsOf({ model, photo }, { node, edits, id, grid, bytes }, patch, place, signal, query) {
  const size = fixedQuery(model, query, photo)
  /** @param {Patch | null} patch null for all */
  const request = (patch) => requestOf(model, [node], photo, { transforms: TRANSFORMS, id, edits,
    query: { ...size, ...(patch && grid ? { tokens: String(queryAt(grid, patch.row, patch.column, tokenOf(place, grid))[1]) } : {}) } })
  /** @type {Map<string, Promise<Answer>>} */ const coming = new Map()
  /** @param {Patch | null} patch */
  const ask = async (patch) => {
    const wanted = request(patch), what = JSON.stringify([id, edits, wanted.query])
    const known = kept(what, photo, signal)
    if (known) return known
    const found = coming.get(what) ?? askFeatures(wanted, photo, "application/x-safetensors", signal).then((answer) =>
      opened(model, answer, { key: node, layout: null, tokens: null }, photo, node, what, signal, edits))
    coming.set(what, found)
    return found.finally(() => coming.delete(what))
  }
  const first = bytes > MOST_BYTES ? patch : null
  const answer = await ask(first)
  return { answer, grid, first, patch, request: request(first), row: async (other) => (first ? ask(other) : answer), idle: () => Promise.allSettled([...coming.values()]) }
}

/** The last request for the weights under a moving pointer, by topic. @type {Map<string, symbol>} */
const pointed = new Map()

/** Wait until the pointer rests and what was asked for has come; fails where it has moved on. @param {string} topic @param {() => Promise<any>} idle */
async function resting(topic, idle) {
  const mine = Symbol(topic)
  pointed.set(topic, mine)
  await new Promise((resolve) => setTimeout(resolve, REST))
  await idle()
  if (pointed.get(topic) !== mine) throw new DOMException("another position is wanted", "AbortError")
}

/**
 * The maps of attention of a position or of a token before the grid, and the choices of them.
 * @param {Answer[]} answers @param {import("./place.js").Place} place
 * @param {(changes: Record<string, string | null>, replace?: boolean) => void} go
 * @param {AbortSignal} signal @param {import("./size.js").Query} query
 * @returns {Promise<{sides: Side[], choices: HTMLElement[], weights: Weights[]}>}
 */
export async function attentionView(answers, place, go, signal, query) {
  /** @type {Weights[]} */ const found = []
  const extractors = answers.map((answer) => extractorOf(answer, signal, query))
  const sides = await eachSide(answers, side)
  const weights = found.filter(Boolean)
  return { sides, choices: weights[0] ? await choicesOf(weights[0], place, go) : [], weights }

  /** The chosen position, which is one of the first grid, in another. @param {Grid} grid */
  async function chosenIn(grid) {
    for (const one of extractors) {
      const first = await one.then((made) => made.grid, () => null)
      if (first) return patchAlike(patchOf(place.at, first), first, grid)
    }
    return null
  }

  /** @param {Answer} answer @param {number} i @returns {Promise<Side>} */
  async function side(answer, i) {
    const { model } = answer
    const made = await extractors[i]
    if (made.note !== undefined) return { note: made.note }
    const { node, grid: own } = made
    const { answer: { shape, slot }, grid } = (found[i] = await weightsOf(answer, made, own && await chosenIn(own), place, signal, query))
    if (!grid) return { note: `The attention of ${node}, ${shape.join(" × ")}, has no known grid of positions.` }
    const head = headOf(place, shape[shape.length - 3])
    const token = tokenOf(place, grid)
    const label = head === null ? "Mean of all heads" : `Head ${head}`
    return {
      photo: answer.photo, model, edited: answer.edits.length > 0, node, label, caption: `${label} of ${node}`, size: grid, query: token === null,
      render: async (/** @type {import("./patch.js").Patch | null} */ patch, /** @type {string} */ topic) => {
        const others = found.flatMap(({ patch: chosen, ...one }) => (one.grid && chosen
          ? { ...one, grid: one.grid, patch: patch ? patchAlike(patch, grid, one.grid) : chosen } : []))
        if (others.some(({ first, patch }) => first && (patch.row !== first.row || patch.column !== first.column)))
          await resting(topic, () => Promise.all(others.map(({ idle }) => idle())))
        const all = await Promise.all(others.map(async ({ row, grid, patch }, k) => {
          const { slot, shape } = await row(patch)
          const message = { slot, head: headOf(place, shape[shape.length - 3]), grid, token: tokenOf(place, grid), ...patch }
          return reduce("attention", message, { topic: `${topic}, ${k}` })
        }))
        return coloured(all[others.findIndex(({ answer }) => answer.slot === slot)], grid.width, range(...all))
      },
    }
  }
}

/** The chosen head; null for the mean of all, and where there is none of that number. @param {import("./place.js").Place} place @param {number} heads */
const headOf = ({ head }, heads) => numberBelow(heads, head)

/** The token before the grid that attends; null for a position. @param {import("./place.js").Place} place @param {Grid} grid */
const tokenOf = ({ q }, { prefix }) => numberBelow(prefix, q)

/** @param {number} most @param {string | undefined} text of the URL */
function numberBelow(most, text) {
  const number = Number(text)
  return text && Number.isInteger(number) && number >= 0 && number < most ? number : null
}

/**
 * Which block, what attends, and by which head, of which each is a tile.
 * @param {Weights} weights @param {import("./place.js").Place} place
 * @param {(changes: Record<string, string | null>, replace?: boolean) => void} go
 */
async function choicesOf({ answer: { model, node, slot, shape }, grid, patch }, place, go) {
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
  const found = await reduce("heads", { slot, grid, token, ...patch })
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

// What is compared with the chosen output: another photo or node, other weights of the model, or another model.

import { features } from "./answers.js"
import { listed } from "./catalogue.js"
import { weightOptions } from "./chooser.js"
import { h, select } from "./dom.js"
import { range } from "./colours.js"
import { sameShape } from "./likeness.js"
import { loadModel } from "./model.js"
import { SAMPLES } from "./photo.js"
import { reduce } from "./reductions.js"
import { sizeQuery } from "./size.js"
import { coloured } from "./views.js"

/** @typedef {import("./answers.js").Answer} Answer */
/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./place.js").Place} Place */
/** @typedef {import("./photo.js").Photo} Photo */
/** @typedef {(changes: Record<string, string | number | null>, replace?: boolean) => void} Go */
/** @typedef {{model: Model | null, answer?: Answer, error?: unknown, large?: boolean, waiting?: HTMLElement}} Other what the chosen output is compared with; `large` where it waits for consent, `waiting` while it is computed */

const MEANING = "Centred kernel alignment with a linear kernel (Kornblith et al., 2019): how alike the two maps tell the positions of this photo apart. " +
  "1: one is a rotation and scaling of the other. Channels need not correspond, nor be equally many. " +
  "Maps are averaged to the coarser grid, at most 20 × 20. With few positions and many channels it is high by chance. Each model sees its own crop of the photo."

/** Whether a place compares models, or weights of one. @param {Place} place */
export const comparesModels = ({ m2, w2 }) => Boolean(m2 || w2)

/** A model and its weights, as people call them. @param {Model} model */
export const titleOf = ({ name, weights }) => `${name} ${weights}`

/** Whether several models, or weights of one, are among them. @param {{model: Model}[]} ones */
export const severalModels = (ones) => new Set(ones.map(({ model }) => titleOf(model))).size > 1

/** What is compared with. @param {Model} model @param {Place} place @param {Array<[string, Photo]>} own photos @param {Go} go */
export function comparisonChoice(model, place, own, go) {
  const { p2 = "", n2, m2, w2 } = place
  const weights = weightOptions(model).filter(([name]) => name !== model.weights || name === w2)
  const options = /** @type {Array<[string, string]>} */ ([
    ["", "Compare with…"], ...own.map(([name, photo]) => [name, photo.title]), ...SAMPLES.map((name) => [name, `Photo ${name}`]),
    ["node", n2 && m2 === undefined && !w2 ? `Node ${n2}` : "This node, beside the next one"],
    ...weights.map(([name, text]) => [`weights ${name}`, `Weights ${text}`]), ["model", "Another model…"],
  ])
  const now = m2 !== undefined ? "model" : w2 ? `weights ${w2}` : n2 ? "node" : p2
  return select("Compare with", options, now, (value) => {
    const kind = value.split(" ")[0], name = value.slice(kind.length + 1)
    const chosen = kind === "node" ? { n2: place.n ?? null } : kind === "weights" ? { w2: name } : kind === "model" ? { m2: "" } : { p2: value || null }
    go(Object.assign({ p2: null, n2: null, m2: null, w2: null, y: null }, chosen))
  })
}

let lists = 0
/** Whether the meaning of the numbers is shown; kept while other maps are chosen. */
let explained = false

/** The choice of another model, and of its weights and node once it is known. @param {Model} model @param {Place} place @param {Model | null} other @param {Go} go */
export function otherChoices(model, place, other, go) {
  if (place.m2 === undefined && !place.w2) return []
  const { name, weights } = other ?? {}
  if (name !== (place.m2 || model.name) || (place.w2 && place.w2 !== weights)) other = null // of the place before
  /** @param {string} label @param {string} value @param {string} placeholder @param {(value: string) => void} chosen */
  const field = (label, value, placeholder, chosen) => {
    const names = h("datalist", { id: `choices-${++lists}` })
    const input = h("input", { type: "search", list: names.id, value, placeholder, "aria-label": label, autocomplete: "off", spellcheck: "false",
      onchange: () => {
        input.defaultValue = input.value // it is no longer being typed
        chosen(input.value.trim())
      } })
    return { input, names, offer: (/** @type {string[]} */ all) => names.replaceChildren(...all.map((name) => h("option", { value: name }))) }
  }
  const nodes = field("Node to compare with", place.n2 ?? "", other ? `at ${nodeAlike(model, place.n ?? "", other)}, or another node` : "", (n2) => go({ n2: n2 || null }))
  if (other) nodes.offer([...Object.keys(other.levels), ...other.nodes.flatMap(({ name, extractable }) => (extractable ? [name] : []))])
  const at = other ? [nodes.input, nodes.names] : []
  if (place.m2 === undefined) return at
  const models = field("Model to compare with", place.m2, "Name of a model", (m2) => go({ m2, w2: null, n2: null }))
  models.input.addEventListener("focus", async () => {
    if (models.names.children.length) return
    try {
      const whole = await listed("")
      models.offer([...whole.models, ...(whole.timm ? (await listed("timm")).models : [])].map(({ name }) => name))
    } catch {
      // A name can be typed without them; they are asked for again at the next focus.
    }
  })
  return [models.input, models.names, ...(other ? [select("Weights to compare with", weightOptions(other), other.weights, (w2) => go({ w2 }))] : []), ...at]
}

/** The node of another model that corresponds to one: of the same level, else of the same name, else where it begins. @param {Model} model @param {string} name @param {Model} other */
export function nodeAlike(model, name, other) {
  const node = model.resolve(name)?.name
  const level = name in model.levels ? name : Object.keys(model.levels).find((one) => model.levels[one].node === node)
  if (other.name !== model.name && level && level in other.levels) return level
  return other.resolve(name) ? name : other.firstNode ?? ""
}

/** The last one; its loading takes no signal, since another place may wait for it as well. @type {{what: string, model: Promise<Model>} | null} */
let last = null

/**
 * The output that the chosen one is compared with; null where no model is.
 * @param {Model} model @param {Place} place @param {Photo} photo @param {(model: Model) => boolean} runs whether a model may be run
 * @param {(other: Model) => void} known called once the model is known @param {AbortSignal} signal
 * @returns {Promise<Other | null>}
 */
export async function otherOutput(model, place, photo, runs, known, signal) {
  if (!comparesModels(place)) return null
  const name = place.m2 || model.name, what = `${name}\n${place.w2 ?? ""}`
  /** @type {Model | null} */ let other = null
  try {
    const found = last?.what === what ? last : (last = { what, model: loadModel(name, place.w2, new AbortController().signal) })
    found.model.catch(() => { if (last === found) last = null })
    other = await found.model
    signal.throwIfAborted()
    known(other)
    if (!other.takesPhotos) throw new Error(`${name} takes tensors, not photos.`)
    const node = place.n2 ?? nodeAlike(model, place.n ?? "", other)
    const there = other.resolve(node)
    if (!there?.extractable) throw new Error(there ? `The output of ${node} of ${name} is not a tensor.` : `${name} has no node ${node}. Choose one above.`)
    if (!runs(other)) return { model: other, large: true }
    return { model: other, answer: await features(other, node, photo, signal, sizeQuery(place)) }
  } catch (error) {
    signal.throwIfAborted()
    return { model: other, error }
  }
}

/** What was found for an answer: other maps of the same two need it again. @type {WeakMap<Answer, {other: Answer, found: Promise<any>}>} */
const likenesses = new WeakMap()

/** @param {Answer} one @param {Answer} other @returns {Promise<{cka: number, cosines: Float32Array | null, mean: number | null}>} */
function likeness(one, other) {
  let known = likenesses.get(one)
  if (known?.other !== other) likenesses.set(one, known = { other, found: reduce("likeness", { slots: [one.slot, other.slot] }) })
  return known.found
}

/** The cosine similarity of two outputs at each position, as a map. @param {Answer} one @param {Answer} other @returns {import("./stages.js").Side[]} */
export function agreementSides(one, other) {
  const { maps, photo, node, model } = one
  if (!maps || !other.maps) return [{ note: `The output of ${(maps ? other : one).node} is not a map.` }]
  if (!sameShape(maps, other.maps)) {
    const [here, there] = [maps, other.maps].map(({ channels, height, width }) => `${channels} × ${height} × ${width}`)
    return [{ note: `The two have different shapes (${here} and ${there}), so no position has a cosine. Linear CKA compares them as a whole.` }]
  }
  const label = `Agreement with ${titleOf(other.model)}`
  return [{
    photo, model, node, label, caption: label, edited: false, size: maps, query: false,
    render: async () => {
      const values = (await likeness(one, other)).cosines ?? new Float32Array()
      return coloured(values, maps.width, range(values))
    },
  }]
}

/**
 * How alike two outputs are, in numbers that mean something whatever their channels are, and the choice of their maps' scale.
 * @param {Answer} one @param {Answer} other @param {string} view @param {Place} place @param {Go} go
 */
export function acrossView(one, other, view, { y }, go) {
  if (!one.maps || !other.maps) return []
  const numbers = h("summary", { title: MEANING }, "Linear CKA …")
  likeness(one, other).then(({ cka, mean }) => {
    numbers.textContent = `Linear CKA ${Number.isFinite(cka) ? cka.toFixed(3) : "undefined"}${mean === null ? "" : `, mean cosine ${mean.toFixed(3)}`}`
  }, () => {})
  const scales = h("button", { type: "button", "aria-pressed": String(y === "own"), onclick: () => go({ y: y === "own" ? null : "own" }, true) }, "Each its own scale")
  const choice = ["channels", "mean"].includes(view) ? scales : ""
  const details = h("details", { class: "dim likeness", open: explained, ontoggle: () => (explained = details.open) }, numbers, h("p", {}, MEANING))
  return [h("div", { class: "row between" }, details, choice)]
}

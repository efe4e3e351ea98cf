// What a classifier says of a photo: the names of its classes, and how sure it is.

import { features } from "./answers.js"
import { askJson, modelPath } from "./api.js"
import { severalModels, titleOf } from "./comparison.js"
import { h } from "./dom.js"
import { editsOf, reaching } from "./edits.js"
import { reduce } from "./reductions.js"
import { sizeQuery } from "./size.js"

/** @typedef {import("./model.js").Model} Model */

const MOST = 5
/** @type {WeakMap<Model, Promise<string[]>>} */
const names = new WeakMap()

/** The names of the classes in order; none where the weights are random or name none. @param {Model} model @returns {Promise<string[]>} */
export function categories(model) {
  const counted = model.weightsKnown[model.weights]?.categories
  if (!counted) return Promise.resolve([])
  let found = names.get(model)
  if (!found) {
    const query = { categories: "true", weights: model.weights }
    found = askJson(modelPath(model.name, "", query)).then(({ weights }) => weights[model.weights]?.category_names ?? [])
    found.catch(() => names.delete(model))
    names.set(model, found)
  }
  return found
}

/** The node with a classifier's scores, one vector for each image; models of one's own count as classifiers and may end otherwise. @param {Model} model */
export function scoresOf(model) {
  const last = model.task === "classification" ? model.nodes.findLast((node) => node.extractable) : null
  return last?.shape?.length === 2 ? last : null
}

/**
 * The number that a class of one model has in another; -1 where it has none. Numbers alone mean the same in weights of one model with equally
 * many classes, unless their names differ.
 * @param {Model} model @param {number} index @param {Model} other
 */
export async function classAlike(model, index, other) {
  if (other === model) return index
  const [names, others] = await Promise.all([model, other].map(categories))
  const unnamed = !names.length || !others.length
  const [size, otherSize] = [model, other].map((one) => scoresOf(one)?.shape?.at(-1))
  if (size === otherSize && (unnamed ? model.name === other.name : names.join() === others.join())) return index
  return index in names ? others.indexOf(names[index]) : -1
}

/**
 * The likeliest classes of a photo; null where the model is no classifier with known names.
 * @param {Model} model @param {import("./photo.js").Photo} photo @param {AbortSignal} signal
 * @param {(index: number) => void} choose a class to be explained
 * @param {{query?: import("./size.js").Query, edits?: import("./edits.js").Edit[], by?: string, photos?: boolean, named?: Model}} [more] `by` tells the model from
 *   others, `photos` is whether there are several, `named` has the names of its classes
 */
export async function predictionsView(model, photo, signal, choose, { query = {}, edits = [], by = "", photos = false, named = model } = {}) {
  const last = scoresOf(model)
  const known = last ? await categories(named) : []
  if (!last || known.length !== last.shape?.at(-1)) return null
  const { slot } = await features(model, last.name, photo, signal, query, edits)
  const shares = softmax(await reduce("values", { slot, most: known.length }))
  if (shares.some(Number.isNaN)) return null
  const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, MOST)
  const what = [photos ? photo.title : "", by, edits.length ? "edited" : ""].filter(Boolean)
  return h("section", { class: "predictions", "aria-label": `Predictions for ${photo.title}${edits.length ? ", edited" : ""}${by && ` by ${by}`}` },
    what.length ? h("p", { class: "dim" }, `${what.join(", ")}:`) : null,
    h("ol", { class: "plain-list" }, ...order.map((i) => {
      const row = h("li", { "data-class": i }, h("button", { type: "button", title: "Why? Show where the evidence is", onclick: () => choose(i) },
        known[i]), h("span", { class: "dim" }, percent(shares[i])))
      row.style.setProperty("--share", `${100 * shares[i]}%`)
      return row
    })))
}

/**
 * What classifiers say of each photo that is shown, and of the edited one.
 * @param {import("./answers.js").Answer[]} answers @param {import("./place.js").Place} place @param {AbortSignal} signal
 * @param {(index: number) => void} explain called with a class of the first model
 */
export async function predictionsOf(answers, place, signal, explain) {
  /** @type {{model: Model, photo: import("./photo.js").Photo, edits: import("./edits.js").Edit[]}[]} */ const subjects = []
  for (const { model, photo } of answers)
    if (!subjects.some((one) => one.photo === photo && titleOf(one.model) === titleOf(model))) subjects.push({ model, photo, edits: [] })
  const [{ model: first, photo }] = answers
  const several = severalModels(answers), photos = subjects.some((one) => one.photo !== photo)
  const edits = reaching(editsOf(place), first, scoresOf(first)?.name ?? "")
  if (edits.length) subjects.push({ model: first, photo, edits })
  const choose = (/** @type {Model} */ one) => async (/** @type {number} */ k) => {
    const index = await classAlike(one, k, first)
    if (index >= 0) explain(index)
  }
  /** @param {Model} one */
  const named = (one) => (one.name !== first.name || one.weightsKnown[one.weights]?.categories ? one : first)
  return (await Promise.all(subjects.map(({ model, photo, edits }) =>
    predictionsView(model, photo, signal, choose(model), { query: sizeQuery(place), edits, by: several ? titleOf(model) : "", photos, named: named(model) })))).flatMap((one) => one ?? [])
}

/** @param {number} share */
const percent = (share) => (share < 0.0005 ? "<0.1 %" : `${(100 * share).toFixed(1)} %`)

/** @param {Float32Array} values */
export function softmax(values) {
  const most = values.reduce((a, b) => Math.max(a, b), -Infinity)
  const powers = values.map((value) => Math.exp(value - most))
  const sum = powers.reduce((a, b) => a + b, 0)
  return powers.map((power) => power / sum)
}

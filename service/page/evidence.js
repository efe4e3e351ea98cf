// Why a classifier says so: where in a photo the evidence for one class lies, by Grad-CAM.

import { askFeatures, kept, opened } from "./answers.js"
import { range } from "./colours.js"
import { titleOf } from "./comparison.js"
import { classAlike, scoresOf } from "./predictions.js"
import { reduce } from "./reductions.js"
import { fixedQuery } from "./size.js"
import { requestOf } from "./snippets.js"
import { eachSide } from "./stages.js"
import { coloured } from "./views.js"

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./answers.js").Answer} Answer */

/** Behind a vision transformer's last attention, patches count no more. */
const ATTENTION = /scaled_dot_product_attention|MultiheadAttention|softmax/i

/** The node to show the evidence at, where the chosen one has no positions. @param {Model} model @returns {string | null} */
export function evidenceNode(model) {
  const deepest = Object.keys(model.levels).at(-1)
  if (deepest) return deepest
  const last = model.nodes.findLastIndex(({ target, module_type }) => ATTENTION.test(target) || ATTENTION.test(module_type ?? ""))
  return model.nodes.slice(0, Math.max(last, 0)).findLast((node) => node.extractable && node.tokens)?.name ?? null
}

/**
 * The evidence for a class at the node of each answer.
 * @param {Answer[]} answers the first is of the model that the class is of @param {{index: number, name: string}} target
 * @param {AbortSignal} signal @param {import("./size.js").Query} size
 * @returns {Promise<{sides: import("./stages.js").Side[], answer?: Answer, request?: import("./snippets.js").Request}>} with the first answer and its request
 */
export async function evidenceView(answers, target, signal, size) {
  /** @type {({answer: Answer, request: import("./snippets.js").Request, height: number, width: number, values: Float32Array} | {note: string})[]} */
  const found = await eachSide(answers, async ({ model, maps, node, photo }) => {
    const of = scoresOf(model)?.name
    const index = await classAlike(answers[0].model, target.index, model)
    if (!of || index < 0) return { note: `${titleOf(model)} has no class that is known to be ${target.name}.` }
    if (!maps) return { note: `The output of ${node} for ${photo.title} is not a map.` }
    const request = requestOf(model, [node], photo, { evidence: { of, target: index }, query: fixedQuery(model, size, photo) })
    const what = JSON.stringify([model.name, model.weights, node, request.evidence, request.query])
    const answer = kept(what, photo, signal) ?? await opened(model,
      await askFeatures(request, photo, "application/x-safetensors", signal), { key: "attribution", layout: null, tokens: null }, photo, node, what, signal)
    const [, height, width] = answer.shape
    return { answer, request, height, width, values: await reduce("values", { slot: answer.slot, most: height * width }) }
  })
  const label = `Evidence for ${target.name}`
  /** One for all photos; different nodes and models have none in common. @param {string} node @param {Model} model */
  const scaleOf = (node, model) => range(...found.flatMap((one) => ("values" in one && one.answer.node === node && one.answer.model.name === model.name ? one.values : [])))
  const sides = found.map((one) => ("note" in one ? one : {
    photo: one.answer.photo, model: one.answer.model, node: one.answer.node, label, caption: label, edited: false, size: { height: one.height, width: one.width }, query: false,
    render: async () => coloured(one.values, one.width, scaleOf(one.answer.node, one.answer.model)),
  }))
  return { sides, ...found.find((one) => "answer" in one) }
}

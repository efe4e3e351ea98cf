// The views of a map, except attention and evidence.

import { image, range, rgbImage, weights } from "./colours.js"
import { patchAlike } from "./patch.js"
import { reduce } from "./reductions.js"

/** @typedef {import("./answers.js").Answer} Answer */

/** @type {Array<[string, string]>} */
export const VIEWS = [["channels", "Channels"], ["mean", "Heat-map"], ["pca", "PCA"], ["similarity", "Similarity"], ["attention", "Attention"], ["why", "Why"], ["agreement", "Agreement"]]

/**
 * One view of each answer.
 * @param {Answer[]} answers @param {string} view @param {number} channel @param {"one" | "own" | "nodes"} [scales] one for all, one each, or one for each node
 * @returns {import("./stages.js").Side[]}
 */
export function viewSides(answers, view, channel, scales = "nodes") {
  const components = view === "pca" ? commonComponents(answers) : null
  const all = ["channels", "mean"].includes(view) ? answers.map((answer) => valuesOf(answer, view, channel)) : []
  return answers.map(({ model, maps, node, photo, edits }, number) => {
    if (!maps) return { note: `The output of ${node} for ${photo.title} is not a map.` }
    const own = Math.min(channel, maps.channels - 1)
    const label = view === "channels" ? `Channel ${own}` : VIEWS.find(([name]) => name === view)?.[1] ?? ""
    return {
      photo, model, node, label, caption: label, edited: edits.length > 0, size: maps, query: view === "similarity",
      render: async (patch, topic) => {
        if (components) return { image: rgbImage((await components)[number], maps.width), values: null, weights: null, scale: null }
        if (view === "similarity" && patch) {
          const all = await Promise.all(answers.map((other, i) => (other.maps
            ? reduce("similarity", { slot: other.slot, ...patchAlike(patch, maps, other.maps) }, { topic: `${topic}, ${i}` }) : new Float32Array())))
          return coloured(all[number], maps.width, range(...all))
        }
        const alike = await Promise.all(all.filter((_, i) => scales === "one" || (scales === "own" ? i === number : answers[i].node === node)))
        return coloured(await all[number], maps.width, range(...alike))
      },
    }
  })
}

/** The values of a view that needs no position. @param {Answer} answer @param {string} view @param {number} channel @returns {Promise<Float32Array>} */
async function valuesOf({ slot, maps }, view, channel) {
  if (!maps) return new Float32Array()
  if (view === "mean") return reduce("magnitude", { slot })
  return (await reduce("channels", { slot, channels: [Math.min(channel, maps.channels - 1)] }))[0]
}

/** What holds of channels of two weights. */
export const CAVEAT = "It means something for weights that were trained from one another: in others, channels of one number have nothing in common."

/** Whether all answers are one model's and have equally many channels, so that they have principal components in common. @param {Answer[]} answers */
const comparable = (answers) => new Set(answers.map(({ model, maps }) => `${model.name} ${maps?.channels}`)).size === 1

/** The colours of each answer's map: on one basis and one scale where that can be. @param {Answer[]} answers @returns {Promise<Uint8ClampedArray[]>} */
function commonComponents(answers) {
  if (comparable(answers)) return reduce("pca", { slots: answers.map(({ slot }) => slot) })
  return Promise.all(answers.map(async ({ slot, maps }) => (maps ? (await reduce("pca", { slots: [slot] }))[0] : new Uint8ClampedArray())))
}

/**
 * A map in colours, on its own range or on that of all that are compared.
 * @param {Float32Array} values @param {number} width @param {import("./colours.js").Range} [scale]
 * @returns {import("./panel.js").Rendering}
 */
export function coloured(values, width, scale = range(values)) {
  return { image: image(values, width, scale), values, weights: weights(values, scale), scale }
}

/** What the colours of a view mean. @param {string} view @param {Answer[]} answers */
export function meaning(view, answers) {
  if (view === "similarity") return "Cosine similarity of each position to the one under the pointer. Click or use the arrow keys to fix a position."
  if (view === "mean") return "The mean of all channels' magnitudes at each position."
  if (answers.length < 2) return "The first three principal components over the positions, as red, green and blue."
  if (comparable(answers)) {
    const text = "The first three principal components over the positions of both, as red, green and blue: equal colours are alike in both."
    return new Set(answers.map(({ model }) => model.weights)).size > 1 ? `${text} ${CAVEAT}` : text
  }
  if (new Set(answers.map(({ model }) => model.name)).size > 1)
    return "The channels of two models have nothing in common, so each has principal components of its own: their colours cannot be compared."
  return `The two have different channels (${answers.map(({ maps }) => maps?.channels ?? "none").join(" and ")}), so each has principal components of its own: their colours cannot be compared.`
}

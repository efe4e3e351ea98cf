// The views of a map, except attention.

import { image, range, rgbImage } from "./colours.js"
import { reduce } from "./reductions.js"

/** @typedef {import("./answers.js").Answer} Answer */

/** @type {Array<[string, string]>} */
export const VIEWS = [["channels", "Channels"], ["mean", "Heat-map"], ["pca", "PCA"], ["similarity", "Similarity"], ["attention", "Attention"]]

/**
 * One view of each answer.
 * @param {Answer[]} answers @param {string} view @param {number} channel
 * @returns {import("./stages.js").Side[]}
 */
export function viewSides(answers, view, channel) {
  const components = view === "pca" ? commonComponents(answers) : null
  return answers.map((answer, number) => {
    const { maps, node, photo, slot } = answer
    if (!maps) return { note: `The output of ${node} for ${photo.name} is not a map.` }
    const own = Math.min(channel, maps.channels - 1)
    const label = view === "channels" ? `Channel ${own}` : VIEWS.find(([name]) => name === view)?.[1] ?? ""
    return {
      photo, node, label, caption: label, size: maps, query: view === "similarity",
      render: async (patch, topic) => {
        if (components) return { image: rgbImage((await components)[number], maps.width), values: null }
        const values = view === "mean" ? await reduce("magnitude", { slot })
          : view === "similarity" ? await reduce("similarity", { slot, ...patch }, { topic })
          : (await reduce("channels", { slot, channels: [own] }))[0]
        return coloured(values, maps.width)
      },
    }
  })
}

/** Whether the maps of all answers have the same channels, so that they have principal components in common. @param {Answer[]} answers */
export const comparable = (answers) => new Set(answers.map(({ maps }) => maps?.channels)).size === 1

/** The colours of each answer's map: on one basis and one scale where that can be. @param {Answer[]} answers @returns {Promise<Uint8ClampedArray[]>} */
function commonComponents(answers) {
  if (comparable(answers)) return reduce("pca", { slots: answers.map(({ slot }) => slot) })
  return Promise.all(answers.map(async ({ slot, maps }) => (maps ? (await reduce("pca", { slots: [slot] }))[0] : new Uint8ClampedArray())))
}

/** A map in colours, from its minimum to its maximum. @param {Float32Array} values @param {number} width @returns {import("./panel.js").Rendering} */
export function coloured(values, width) {
  const { low, high } = range(values)
  return { image: image(values, width, low, high), values }
}

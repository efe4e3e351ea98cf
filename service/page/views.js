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
  return answers.map((answer) => {
    const { maps, node, photo } = answer
    if (!maps) return { note: `The output of ${node} for ${photo.name} is not a map.` }
    const own = Math.min(channel, maps.channels - 1)
    const label = view === "channels" ? `Channel ${own}` : VIEWS.find(([name]) => name === view)?.[1] ?? ""
    return { photo, node, label, caption: label, size: maps, query: view === "similarity", render: (patch) => renderView(answer, view, own, patch) }
  })
}

/**
 * Render one view of an answer.
 * @param {Answer} answer @param {string} view @param {number} channel @param {import("./patch.js").Patch | null} patch
 * @returns {Promise<import("./panel.js").Rendering>}
 */
async function renderView({ slot, maps }, view, channel, patch) {
  const width = maps?.width ?? 1
  if (view === "pca") return { image: rgbImage(await reduce("pca", { slot }), width), values: null }
  const values = view === "mean" ? await reduce("magnitude", { slot })
    : view === "similarity" ? await reduce("similarity", { slot, ...patch })
    : (await reduce("channels", { slot, channels: [channel] }))[0]
  return coloured(values, width)
}

/** A map in colours, from its minimum to its maximum. @param {Float32Array} values @param {number} width @returns {import("./panel.js").Rendering} */
export function coloured(values, width) {
  const { low, high } = range(values)
  return { image: image(values, width, low, high), values }
}

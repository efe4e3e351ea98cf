// The ways in which maps are looked at.

import { image, range, rgbImage } from "./colours.js"
import { reduce } from "./reductions.js"

/** @typedef {import("./answers.js").Answer} Answer */

/** @type {Array<[string, string]>} */
export const VIEWS = [["channels", "Channels"], ["mean", "Heat-map"], ["pca", "PCA"], ["similarity", "Similarity"], ["attention", "Attention"]]

/**
 * One view of each answer, but for attention.
 * @param {Answer[]} answers @param {string} view @param {number} channel
 * @returns {import("./stages.js").Side[]}
 */
export function viewSides(answers, view, channel) {
  return answers.map((answer) => {
    const { maps, node, photo } = answer
    if (!maps) return { note: `${node} gives no map over ${photo.name}.` }
    const own = Math.min(channel, maps.channels - 1)
    const label = view === "channels" ? `Channel ${own}` : VIEWS.find(([name]) => name === view)?.[1] ?? ""
    return { photo, node, label, caption: label, size: maps, ofPlace: view === "similarity", look: (patch) => lookAt(answer, view, own, patch) }
  })
}

/**
 * What one view makes of an answer.
 * @param {Answer} answer @param {string} view @param {number} channel @param {import("./patch.js").Patch | null} patch
 * @returns {Promise<import("./panel.js").Look>}
 */
async function lookAt({ slot, maps }, view, channel, patch) {
  const width = maps?.width ?? 1
  if (view === "pca") return { image: rgbImage(await reduce("pca", { slot }), width), values: null }
  const values = view === "mean" ? await reduce("magnitude", { slot })
    : view === "similarity" ? await reduce("similarity", { slot, ...patch })
    : (await reduce("channels", { slot, channels: [channel] }))[0]
  return coloured(values, width)
}

/** A map from its least to its greatest value. @param {Float32Array} values @param {number} width @returns {import("./panel.js").Look} */
export function coloured(values, width) {
  const { low, high } = range(values)
  return { image: image(values, width, low, high), values }
}

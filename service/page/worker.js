// Holds the tensors of the answers that are shown, and reduces them off the main thread.

import { attended, entropies } from "./attended.js"
import { cosines, linearCka, sameShape } from "./likeness.js"
import { asMaps, channelFacts, channelOf, magnitude, similarity, statistics } from "./maps.js"
import { rgb } from "./pca.js"
import { parse } from "./safetensors.js"

/** @typedef {import("./maps.js").Maps} Maps */

/** @type {Map<string, {maps: Maps | null, data: Float32Array, shape: number[]}>} */
const held = new Map()

/** @type {Record<string, (message: any) => any>} */
const operations = {
  open({ slot, buffer, key, layout, tokens }) {
    const tensor = parse(buffer).get(key)
    if (!tensor) throw new Error(`the answer has no tensor ${key}`)
    const maps = asMaps(tensor, layout, tokens)
    held.set(slot, { maps, data: tensor.data, shape: tensor.shape })
    const size = maps && { channels: maps.channels, height: maps.height, width: maps.width }
    return { shape: tensor.shape, dtype: tensor.dtype, statistics: statistics(tensor.data), maps: size, ...(maps ? channelFacts(maps) : {}) }
  },
  channels({ slot, channels }) {
    const maps = mapsOf(slot)
    return channels.map((/** @type {number} */ channel) => channelOf(maps, channel))
  },
  channelStatistics: ({ slot, channel }) => statistics(channelOf(mapsOf(slot), channel)),
  magnitude: ({ slot }) => magnitude(mapsOf(slot)),
  similarity: ({ slot, row, column }) => similarity(mapsOf(slot), row, column),
  likeness({ slots }) {
    const [one, other] = slots.map(mapsOf)
    const found = sameShape(one, other) ? cosines(one, other) : null
    return { cka: linearCka(one, other), cosines: found, mean: found && found.reduce((sum, value) => sum + value, 0) / found.length }
  },
  pca: ({ slots }) => rgb(slots.map(mapsOf)),
  // Of many nodes at once, which are not held.
  pictures({ buffer, nodes, view }) {
    const tensors = parse(buffer)
    return nodes.map((/** @type {{key: string, layout: string | null, tokens: import("./maps.js").Grid | null}} */ { key, layout, tokens }) => {
      const tensor = tensors.get(key), maps = tensor && asMaps(tensor, layout, tokens)
      if (!maps) return null
      return view === "pca" ? { width: maps.width, rgb: rgb([maps])[0] } : { width: maps.width, values: magnitude(maps) }
    })
  },
  close: ({ slot }) => held.delete(slot),
  values: ({ slot, most }) => held.get(slot)?.data.slice(0, most),
  attention: ({ slot, grid, head, row, column, token }) => attended(weightsOf(slot), grid, head, row, column, token),
  heads({ slot, grid, row, column, token }) {
    const found = weightsOf(slot)
    return entropies(found, grid, row, column, token).map((entropy, head) => ({ entropy, values: attended(found, grid, head, row, column, token) }))
  },
}

/** @param {string} slot */
function weightsOf(slot) {
  const found = held.get(slot)
  if (!found) throw new Error("there is no answer yet")
  return found
}

/** @param {string} slot */
function mapsOf(slot) {
  const maps = held.get(slot)?.maps
  if (!maps) throw new Error("this tensor is not a map")
  return maps
}

addEventListener("message", ({ data: { operation, ...message } }) => {
  try {
    postMessage({ result: operations[operation](message) })
  } catch (error) {
    postMessage({ error: String(error instanceof Error ? error.message : error) })
  }
})

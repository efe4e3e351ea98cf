// The images of the operator's data set with the largest values of a channel.

import { ask, askJson, modelPath } from "./api.js"
import { h } from "./dom.js"
import { short } from "./numbers.js"

/** @typedef {import("./model.js").Model} Model */
/** @typedef {{rank: number, name: string, value: number, image: string}} TopImage */

/** The last rows, and pictures by their address. */
const MOST_ROWS = 64
const MOST_PICTURES = 512
/** @type {Map<string, Promise<TopImage[]>>} */ const rows = new Map()
/** @type {Map<string, Promise<Blob>>} */ const pictures = new Map()

/**
 * A row of images, which come in by themselves; null where the server has none of this node with these weights.
 * @param {Model} model @param {string} name of the node @param {number} channel
 */
export function topView(model, name, channel) {
  const node = model.resolve(name)?.name ?? ""
  const { statistics } = model
  if (!statistics?.nodes.includes(node) || statistics.weights !== model.weights) return null
  const row = h("ol", { class: "top-images plain-list", "aria-busy": "true" })
  fill(row, model.name, node, channel)
  return h("section", { "aria-label": "Top images" }, h("h3", {}, "Top images"), row,
    h("p", { class: "dim" }, `Of ${statistics.images} images, those with the largest values of channel ${channel}.`))
}

/** @param {HTMLElement} row @param {string} model @param {string} node @param {number} channel */
async function fill(row, model, node, channel) {
  try {
    const path = modelPath(model, "/statistics", { node, channel: String(channel) })
    const top = await kept(rows, MOST_ROWS, path, async () => (await askJson(path)).top)
    row.replaceChildren(...top.map(figure))
  } catch (error) {
    row.replaceWith(h("p", { class: "note" }, error instanceof Error ? error.message : String(error)))
  }
  row.setAttribute("aria-busy", "false")
}

/** @param {TopImage} top */
function figure({ rank, name, value, image }) {
  const picture = h("img", { alt: name, title: `${rank}. ${name}`, onload: () => URL.revokeObjectURL(picture.src) })
  const path = image.slice(1) // relative, as all addresses of the page
  // By a request of its own, since an address alone carries no API key. One that cannot be had shows its name.
  kept(pictures, MOST_PICTURES, path, async () => (await ask(path)).blob())
    .then((blob) => { picture.src = URL.createObjectURL(blob) }, () => {})
  return h("li", {}, picture, h("span", {}, short(value)))
}

/**
 * What `make` gives, made once.
 * @template T
 * @param {Map<string, Promise<T>>} known @param {number} most @param {string} path @param {() => Promise<T>} make
 */
function kept(known, most, path, make) {
  const found = known.get(path) ?? make()
  known.delete(path)
  known.set(path, found)
  found.catch(() => known.delete(path))
  for (const oldest of known.keys()) {
    if (known.size <= most) break
    known.delete(oldest)
  }
  return found
}

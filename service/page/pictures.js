// Small pictures of nodes' outputs for the graph: one request for all that are in sight.

import { askFeatures } from "./answers.js"
import { Problem } from "./api.js"
import { image, range, rgbImage } from "./colours.js"
import { h } from "./dom.js"
import { visibleRegion } from "./photo.js"
import { reduce } from "./reductions.js"
import { enlargement, gridAt, preprocessingAt } from "./size.js"
import { requestOf } from "./snippets.js"
import { picture } from "./stage.js"

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./model.js").NodeInfo} NodeInfo */
/** @typedef {import("./photo.js").Photo} Photo */
/** @typedef {{model: Model, photo: Photo, view: string, size: import("./size.js").Query}} Subject */

/** How long the graph rests before pictures are asked for, in milliseconds. */
const REST = 200
/** The most values that one request is for: two bytes each. */
const MOST_VALUES = 8e6
const LATER = [0, 429, 502, 503]
/** Problems that fewer nodes have, too. */
const OF_EACH = /\/(bad-image|body-too-large|deadline-exceeded|extractor-failed|forbidden|image-too-large|unknown-model|weights-unavailable)$/
const MOST_KEPT = 600
/** Their longest side; larger ones are drawn smaller. */
const SIDE = 128

export class Pictures {
  /** By what they show, the last ones last; null for those that cannot be had. @type {Map<string, HTMLCanvasElement | null>} */ #known = new Map()
  /** @type {Subject | null} */ #subject = null
  /** @type {NodeInfo[]} */ #wanted = []
  /** The most nodes that one request is for: fewer after one of several was refused. */ #most = Infinity
  #timer = 0
  /** @type {{nodes: NodeInfo[], stop: AbortController} | null} */ #asking = null

  /** @param {() => void} changed called after more pictures have come */
  constructor(changed) {
    this.changed = changed
  }

  /** What pictures are shown of, from now on; null for none. @param {Subject | null} subject */
  show(subject) {
    const before = this.#subject
    const same = before?.model === subject?.model && before?.photo === subject?.photo && before?.view === subject?.view && before?.size.image_size === subject?.size.image_size && before?.size.fit === subject?.size.fit
    this.#subject = subject
    if (same) return
    this.#asking?.stop.abort()
    this.#asking = null
    this.changed()
  }

  /** The picture of a node; undefined where there is none yet, null where none can be had. @param {string} node */
  get(node) {
    return this.#subject ? this.#known.get(this.#key(node)) : null
  }

  /** Ask for the pictures of the nodes in sight. @param {string[]} names */
  want(names) {
    const subject = this.#subject
    if (!subject) return
    this.#wanted = names.map((name) => subject.model.byName.get(name)).filter((node) => node !== undefined)
    if (this.#asking && !this.#asking.nodes.some((node) => this.#wanted.includes(node))) {
      this.#asking.stop.abort()
      this.#asking = null
    }
    clearTimeout(this.#timer)
    if (names.length && !this.#asking) this.#timer = setTimeout(() => this.#ask(), REST)
  }

  /** @param {string} node */
  #key(node) {
    const { model, photo, view, size } = /** @type {Subject} */ (this.#subject)
    return [model.name, model.weights, photoNumber(photo), view, size.image_size, size.fit, node].join("\n")
  }

  async #ask() {
    const subject = this.#subject
    if (!subject || this.#asking) return
    const { model, photo, view, size } = subject
    /** @type {NodeInfo[]} */ const nodes = []
    let values = 0
    const larger = enlargement(model, size, photo)
    for (const node of this.#wanted) {
      if (nodes.length >= this.#most) break
      if (this.#known.has(this.#key(node.name))) continue
      if (node.op === "placeholder") this.#keep(node.name, photograph(photo, preprocessingAt(model, size)))
      else if ((values += (node.shape ?? []).reduce((/** @type {number} */ product, size) => product * (size ?? 1), larger)) <= MOST_VALUES || !nodes.length) nodes.push(node)
      else break
    }
    if (!nodes.length) return this.changed()
    const asking = (this.#asking = { nodes, stop: new AbortController() })
    /** @param {string} dtype */
    const ask = (dtype) => {
      const request = requestOf(model, nodes.map(({ name }) => name), photo, { query: { dtype, backend: "eager", ...size } })
      return askFeatures(request, photo, "application/x-safetensors", asking.stop.signal)
    }
    /** @type {Array<{width: number, values?: Float32Array, rgb?: Uint8ClampedArray} | null>} */ let found = []
    try {
      const answer = await ask("float16").catch((error) => {
        if (!(error instanceof Problem && error.type.endsWith("/overflow"))) throw error
        return ask("bfloat16") // of less precision, for values of any size
      })
      const buffer = await answer.arrayBuffer()
      const grids = nodes.map(({ name, layout, tokens, rows_per_image }) => ({ key: name, layout: rows_per_image === 1 ? layout : null, tokens: gridAt(model, tokens, size, photo) }))
      found = await reduce("pictures", { buffer, nodes: grids, view }, { transfer: [buffer] })
      this.#most *= 2
    } catch (error) {
      // The pane beside the graph says why.
      if (this.#asking !== asking) return
      this.#asking = null
      const ofEach = error instanceof Problem && OF_EACH.test(error.type)
      if (error instanceof Problem && LATER.includes(error.status) && !ofEach && !error.type.endsWith("/out-of-memory")) {
        if (error.after) setTimeout(() => this.changed(), 1000 * error.after)
        return
      }
      if (nodes.length > 1 && !ofEach) this.#most = Math.floor(nodes.length / 2)
      else for (const { name } of nodes) this.#keep(name, null)
      return this.changed()
    }
    if (this.#asking !== asking) return
    this.#asking = null
    nodes.forEach(({ name }, i) => this.#keep(name, found[i] ? small(found[i]) : null))
    this.changed()
  }

  /** @param {string} node @param {HTMLCanvasElement | null} canvas */
  #keep(node, canvas) {
    this.#known.set(this.#key(node), canvas)
    for (const oldest of this.#known.keys()) {
      if (this.#known.size <= MOST_KEPT) break
      this.#known.delete(oldest)
    }
  }
}

/** @type {WeakMap<Photo, number>} */
const numbers = new WeakMap()
let photos = 0

/** Names are no identity: two photos may have the same. @param {Photo} photo */
function photoNumber(photo) {
  if (!numbers.has(photo)) numbers.set(photo, ++photos)
  return numbers.get(photo)
}

/** @param {{width: number, values?: Float32Array, rgb?: Uint8ClampedArray}} map */
function small({ width, values, rgb }) {
  if (!values) return scaled(picture(rgbImage(rgb ?? new Uint8ClampedArray(), width)))
  return scaled(picture(image(values, width, range(values))))
}

/** @param {HTMLCanvasElement} whole */
function scaled(whole) {
  const share = SIDE / Math.max(whole.width, whole.height)
  if (share >= 1) return whole
  const canvas = h("canvas", { width: Math.max(1, Math.round(whole.width * share)), height: Math.max(1, Math.round(whole.height * share)) })
  canvas.getContext("2d")?.drawImage(whole, 0, 0, canvas.width, canvas.height)
  return canvas
}

/** The photo as the model sees it. @param {Photo} photo @param {any} preprocessing */
function photograph({ bitmap }, preprocessing) {
  if (!bitmap) return null
  const { x, y, width, height } = visibleRegion(preprocessing, bitmap.width, bitmap.height)
  const share = SIDE / Math.max(width, height)
  const canvas = h("canvas", { width: Math.max(1, Math.round(width * share)), height: Math.max(1, Math.round(height * share)) })
  canvas.getContext("2d")?.drawImage(bitmap, -x * share, -y * share, bitmap.width * share, bitmap.height * share)
  return canvas
}

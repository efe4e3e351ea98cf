// A model: its description, and its graph's nodes as a tree of modules.

import { askJson, modelPath } from "./api.js"

/**
 * @typedef {object} NodeInfo
 * @property {string} name
 * @property {string} op
 * @property {string} target
 * @property {string | null} module_type
 * @property {string[]} args
 * @property {string[]} users
 * @property {Array<number | null> | null} shape
 * @property {string | null} dtype
 * @property {string | null} layout
 * @property {number | null} stride
 * @property {string | null} level
 * @property {number} params
 * @property {number} flops
 * @property {boolean} extractable
 * @property {number} rows_per_image
 * @property {import("./maps.js").Grid | null} tokens
 */

/**
 * A module with its parts, or a node, which has no parts.
 * @typedef {object} Part
 * @property {string} path
 * @property {string} label the last piece of the path
 * @property {Part[]} parts
 * @property {NodeInfo[]} nodes every node inside it
 */

/** The fewest boxes that the graph begins with, where the model has that many. */
const FEWEST_BOXES = 6
/** A module that holds this share of all nodes is opened anyway, up to this many boxes. */
const LARGE_SHARE = 0.6
const MOST_BOXES = 40

export class Model {
  /** @param {any} detail @param {any} graph @param {string} weights */
  constructor(detail, graph, weights) {
    /** @type {string} */ this.name = detail.name
    /** @type {string} */ this.task = detail.task
    /** @type {Record<string, {cached: boolean, num_params: number, url: string | null, categories: number | null}>} */ this.weightsKnown = detail.weights
    /** @type {string | null} */ this.defaultWeights = detail.default_weights
    /** @type {Record<string, {node: string, channels: number, stride: number}>} */ this.levels = graph.levels ?? detail.levels
    /** @type {any} */ this.preprocessing = detail.preprocessing
    /** Of pixels, of which each side of the input should be one. @type {number} */ this.multiple = detail.multiple
    /** @type {{name: string, layout: string, shape: Array<number | null>}[]} */ this.inputs = detail.inputs
    /** How the service computes in each; with no backends it does not. @type {Record<string, {backends: string[], note: string | null}>} */ this.precisions = detail.precisions
    /** @type {{weights: string, images: number, nodes: string[]} | null} */ this.statistics = detail.statistics
    /** @type {{path: string, reason: string}[]} */ this.closed = detail.closed
    /** @type {{params: number, flops: number, nodes: number}} */ this.totals = graph.totals
    /** @type {NodeInfo[]} */ this.nodes = graph.nodes
    this.weights = weights
    this.byName = new Map(this.nodes.map((node) => [node.name, node]))
    /** Every module by its path. */ this.modules = tree(this.nodes)
    this.root = /** @type {Part} */ (this.modules.get(""))
  }

  /** Whether it takes single photos: video models do not, nor those of other channels than colours or grey. */
  get takesPhotos() {
    const [{ layout, shape }] = this.inputs
    return this.inputs.length === 1 && !layout.includes("T") && [1, 3].includes(shape[1] ?? 3)
  }

  /**
   * The node that a name means, as the service resolves it: a node, a level, or the last node under a path.
   * @param {string | undefined} name
   * @returns {NodeInfo | null}
   */
  resolve(name) {
    if (!name) return null
    const level = this.levels[name]
    const exact = this.byName.get(name) ?? (level && this.byName.get(level.node))
    return exact ?? this.nodes.findLast((node) => node.name.startsWith(`${name}.`)) ?? null
  }

  /** The names of the nodes that one depends on, and its own. @param {string} name @returns {Set<string>} */
  before(name) {
    const found = new Set([name])
    for (const one of found) for (const source of this.byName.get(one)?.args ?? []) found.add(source)
    return found
  }

  /** The node to begin with: a deep level, else the last node with a map over the image, else the last with a tensor. */
  get firstNode() {
    const level = ["C4", "C3", "P4", "P3", ...Object.keys(this.levels)].find((name) => name in this.levels)
    const tensors = this.nodes.filter((node) => node.extractable)
    return level ?? tensors.findLast((node) => node.tokens ?? node.stride)?.name ?? tensors.at(-1)?.name ?? null
  }

  /** The modules that are open at first: the largest, until there are enough boxes. */
  get firstOpen() {
    /** @type {Set<string>} */
    const open = new Set()
    let shown = this.root.parts
    for (;;) {
      const largest = shown.filter((part) => part.parts.length).sort((a, b) => b.nodes.length - a.nodes.length)[0]
      if (!largest) break
      const large = largest.nodes.length > LARGE_SHARE * this.nodes.length && shown.length + largest.parts.length <= MOST_BOXES
      if (shown.length >= FEWEST_BOXES && !large) break
      open.add(largest.path)
      shown = shown.flatMap((part) => (part === largest ? part.parts : [part]))
    }
    return open
  }
}

/** @param {NodeInfo[]} nodes @returns {Map<string, Part>} by their paths; that of the whole is empty */
function tree(nodes) {
  /** @type {Part} */
  const root = { path: "", label: "", parts: [], nodes }
  const modules = new Map([["", root]])
  for (const node of nodes) {
    if (node.op === "get_attr" && !node.name.includes(".")) continue // a parameter used as it is
    const pieces = node.name.split(".")
    let above = root
    for (let depth = 1; depth < pieces.length; depth++) {
      const path = pieces.slice(0, depth).join(".")
      let part = modules.get(path)
      if (!part) {
        part = { path, label: pieces[depth - 1], parts: [], nodes: [] }
        modules.set(path, part)
        above.parts.push(part)
      }
      part.nodes.push(node)
      above = part
    }
    above.parts.push({ path: node.name, label: pieces[pieces.length - 1], parts: [], nodes: [node] })
  }
  return modules
}

/**
 * @param {string} name
 * @param {string | undefined} weights without them: the default ones where they are cached, else random ones, so that
 *   nothing is downloaded unasked
 * @param {AbortSignal} signal
 */
export async function loadModel(name, weights, signal) {
  const detail = await askJson(modelPath(name, "", weights ? { weights } : {}), { signal })
  const there = detail.default_weights && detail.weights[detail.default_weights]?.cached
  const chosen = weights ?? (there ? detail.default_weights : "random")
  const graph = await askJson(modelPath(name, "/graph", { format: "json", weights: chosen }), { signal })
  return new Model(detail, graph, chosen)
}

/** All modules above a node, the outermost first. @param {string} name */
export function modulesAbove(name) {
  const pieces = name.split(".")
  return pieces.slice(1).map((_, i) => pieces.slice(0, i + 1).join("."))
}

/** Whether a part of the tree is, or holds, the node of this name. @param {string} path @param {string} name */
export function holds(path, name) {
  return name === path || name.startsWith(`${path}.`)
}

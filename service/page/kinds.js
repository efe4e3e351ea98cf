// Kinds of nodes, each with its colour, and what modules are made of.

import { kind } from "./tree.js"

/** @typedef {import("./model.js").NodeInfo} NodeInfo */
/** @typedef {{name: string, colour: string}} Kind */
/** @typedef {{kind: Kind, share: number}[]} Makeup */

/** The first that the type of a node matches is its kind. @type {Array<Kind & {types: RegExp}>} */
const KINDS = [
  { name: "normalization", colour: "#2a9d8f", types: /norm/i },
  { name: "attention", colour: "#c2408f", types: /attention|attn|softmax/i },
  { name: "convolution", colour: "#4a7bd0", types: /^conv/i },
  { name: "linear", colour: "#8a5cd6", types: /linear|matmul|bmm|einsum/i },
  { name: "activation", colour: "#d08a10", types: /relu|elu|silu|swish|sigmoid|tanh|mish|softplus/i },
  { name: "pooling", colour: "#6b8e23", types: /pool|interpolate|upsample/i },
]

/** @param {NodeInfo} node @returns {Kind | undefined} */
function kindOf(node) {
  const type = kind(node)
  return KINDS.find(({ types }) => types.test(type))
}

/** The kinds of some nodes, with the share of each among them, in the order above; helpers do not count. @param {NodeInfo[]} nodes @returns {Makeup} */
export function makeup(nodes) {
  const found = nodes.map(kindOf).filter((one) => one !== undefined)
  return KINDS.map((kind) => ({ kind, share: found.filter((one) => one === kind).length / found.length })).filter(({ share }) => share > 0)
}

/** How often the same module is repeated in one that holds nothing else; 1 where it is none of these. @param {import("./model.js").Part | undefined} part */
export function repeats(part) {
  const made = new Set(part?.parts.map(({ parts, nodes }) => (parts.length ? nodes.map(kind).join(" ") : "")))
  return part && made.size === 1 && !made.has("") ? part.parts.length : 1
}

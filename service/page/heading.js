// The chosen node: its type, shape and cost, and the nodes at the other end of its edges.

import { h } from "./dom.js"
import { flops, megabytes, parameters, shapeText } from "./numbers.js"
import { holds } from "./model.js"
import { kind } from "./tree.js"

/** @typedef {import("./model.js").NodeInfo} NodeInfo */

const FLOPS_MEANING = "A multiplication and an addition are two FLOPs: twice the multiply-adds that torchvision lists. Convolutions and products of matrices are counted."
/** The most nodes named as inputs or as users: DenseNet's last layers read dozens. */
const MOST_ENDS = 4

/**
 * @param {import("./model.js").Model} model
 * @param {NodeInfo} node
 * @param {string} name what was chosen: the node, or a module that ends with it
 * @param {(path: string) => void} choose
 * @param {(weights: string) => void} load
 * @param {number[] | null} shape of its output for the photo; null before that is known
 */
export function heading(model, node, name, choose, load, shape) {
  const inside = model.nodes.filter((other) => other === node || holds(name, other.name))
  const facts = [kind(node), shapeText(shape ?? node.shape), node.layout, node.stride ? `stride ${node.stride}` : null, node.dtype]
  const count = inside.length > 1 ? `${inside.length} nodes, ` : ""
  const [operations, weights] = [sum(inside, "flops"), sum(inside, "params")]
  const other = shape && node.shape && String(shape.slice(1)) !== String(node.shape.slice(1))
  const nominal = other && operations ? ` for an input of ${shapeText(model.inputs[0].shape)}` : ""
  return [
    h("div", { class: "title-row" }, h("h2", { class: "node" }, node.name), node.level ? h("span", { class: "pill" }, node.level) : null),
    h("p", { class: "dim" }, facts.filter(Boolean).join(" · ")),
    operations || weights ? h("p", { class: "dim", title: FLOPS_MEANING }, `${count}${flops(operations)}${nominal}, ${parameters(weights)}`) : "",
    edges("From", inside.flatMap(({ args }) => args)),
    edges("To", inside.flatMap(({ users }) => users)),
    model.weights === "random" ? untrained(model, load) : "",
  ]

  /** The nodes outside that it reads, or that read it. @param {string} title @param {string[]} ends */
  function edges(title, ends) {
    const outside = [...new Set(ends)].map((end) => model.byName.get(end)).filter((end) => end?.extractable && !inside.includes(end))
    if (!outside.length) return ""
    const more = outside.length > MOST_ENDS ? ` and ${outside.length - MOST_ENDS} more` : ""
    return h("p", { class: "dim edges" }, title, ...outside.slice(0, MOST_ENDS).map((end) =>
      h("button", { type: "button", class: "quiet", "aria-label": `${title} ${end?.name}`, onclick: () => end && choose(end.name) }, end?.name ?? "")), more)
  }
}

/** That the weights are random, and a way to trained ones. @param {import("./model.js").Model} model @param {(weights: string) => void} load */
function untrained({ defaultWeights, weightsKnown }, load) {
  const { cached = true, num_params: count = 0 } = (defaultWeights && weightsKnown[defaultWeights]) || {}
  const size = !cached && count ? ` (about ${megabytes(4 * count)})` : ""
  return h("div", { class: "badge row between" }, h("span", {}, h("strong", {}, "Random weights"), ": untrained, so the maps are noise."),
    defaultWeights ? h("button", { type: "button", onclick: () => load(defaultWeights) }, `Load ${defaultWeights}${size}`) : null)
}

/** @param {NodeInfo[]} nodes @param {"flops" | "params"} what */
function sum(nodes, what) {
  return nodes.reduce((total, node) => total + node[what], 0)
}

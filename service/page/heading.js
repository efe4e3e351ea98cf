// What is known of the chosen node, above what it makes of a photo, and the edges that lead away from it.

import { h } from "./dom.js"
import { flops, parameters, shapeText } from "./numbers.js"
import { holds } from "./model.js"
import { kind } from "./tree.js"

/** @typedef {import("./model.js").NodeInfo} NodeInfo */

/** The most nodes that are named at one end of the edges: DenseNet's last layers read dozens. */
const MOST_ENDS = 4

/**
 * @param {import("./model.js").Model} model
 * @param {NodeInfo} node
 * @param {string} name what was chosen: the node, or a module that ends with it
 * @param {(path: string) => void} choose
 */
export function heading(model, node, name, choose) {
  const inside = model.nodes.filter((other) => other === node || holds(name, other.name))
  const facts = [kind(node), shapeText(node.shape), node.layout, node.stride ? `stride ${node.stride}` : null, node.dtype]
  const count = inside.length > 1 ? `${inside.length} nodes, ` : ""
  const [operations, weights] = [sum(inside, "flops"), sum(inside, "params")]
  return [
    h("div", { class: "title-row" }, h("h2", { class: "node" }, node.name), node.level ? h("span", { class: "pill" }, node.level) : null),
    h("p", { class: "dim" }, facts.filter(Boolean).join(" · ")),
    operations || weights ? h("p", { class: "dim" }, `${count}${flops(operations)}, ${parameters(weights)}`) : "",
    edges("From", inside.flatMap(({ args }) => args)),
    edges("To", inside.flatMap(({ users }) => users)),
    model.weights === "random" ? h("p", { class: "badge" }, "Random weights: what is seen comes from the architecture alone") : "",
  ]

  /** The nodes outside that give values to it, or read its own. @param {string} title @param {string[]} ends */
  function edges(title, ends) {
    const outside = [...new Set(ends)].map((end) => model.byName.get(end)).filter((end) => end?.extractable && !inside.includes(end))
    if (!outside.length) return ""
    const more = outside.length > MOST_ENDS ? ` and ${outside.length - MOST_ENDS} more` : ""
    return h("p", { class: "dim edges" }, title, ...outside.slice(0, MOST_ENDS).map((end) =>
      h("button", { type: "button", class: "quiet", "aria-label": `${title} ${end?.name}`, onclick: () => end && choose(end.name) }, end?.name ?? "")), more)
  }
}

/** @param {NodeInfo[]} nodes @param {"flops" | "params"} what */
function sum(nodes, what) {
  return nodes.reduce((total, node) => total + node[what], 0)
}

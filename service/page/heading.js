// What is known of the chosen node, above what it makes of a photo.

import { h } from "./dom.js"
import { flops, parameters, shapeText } from "./numbers.js"
import { holds } from "./model.js"
import { kind } from "./tree.js"

/** @typedef {import("./model.js").NodeInfo} NodeInfo */

/** @param {import("./model.js").Model} model @param {NodeInfo} node @param {string} name what was chosen: the node, or a module that ends with it */
export function heading(model, node, name) {
  const inside = model.nodes.filter((other) => other === node || holds(name, other.name))
  const facts = [kind(node), shapeText(node.shape), node.layout, node.stride ? `stride ${node.stride}` : null, node.dtype]
  const count = inside.length > 1 ? `${inside.length} nodes, ` : ""
  const [operations, weights] = [sum(inside, "flops"), sum(inside, "params")]
  return [
    h("div", { class: "title-row" }, h("h2", { class: "node" }, node.name), node.level ? h("span", { class: "pill" }, node.level) : null),
    h("p", { class: "dim" }, facts.filter(Boolean).join(" · ")),
    operations || weights ? h("p", { class: "dim" }, `${count}${flops(operations)}, ${parameters(weights)}`) : "",
    model.weights === "random" ? h("p", { class: "badge" }, "Random weights: what is seen comes from the architecture alone") : "",
  ]
}

/** @param {NodeInfo[]} nodes @param {"flops" | "params"} what */
function sum(nodes, what) {
  return nodes.reduce((total, node) => total + node[what], 0)
}

// The module tree: expanded as the graph is; its rows choose nodes.

import { h } from "./dom.js"
import { holds } from "./model.js"

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./model.js").Part} Part */

/** The most nodes that a search lists. */
const MOST_FOUND = 200

/**
 * @param {Model} model
 * @param {Set<string>} open
 * @param {string | null} chosen the name of a node
 * @param {string} wanted what is searched for
 * @param {{choose: (path: string) => void, toggle: (path: string) => void}} actions
 */
export function moduleTree(model, open, chosen, wanted, actions) {
  const list = h("ul", { class: "tree plain-list" })
  if (wanted) {
    const found = matches(model.nodes, wanted)
    list.append(...found.slice(0, MOST_FOUND).map((node) => row(leaf(node), 0, node.name)))
    if (!found.length) list.append(h("li", { class: "dim note" }, "No node of this name or type."))
  } else add(model.root.parts, 0)
  return list

  /** @param {Part[]} parts @param {number} depth */
  function add(parts, depth) {
    for (const part of parts) {
      list.append(row(part, depth, part.label))
      if (part.parts.length && open.has(part.path)) add(part.parts, depth + 1)
    }
  }

  /** @param {Part} part @param {number} depth @param {string} label */
  function row(part, depth, label) {
    const opened = open.has(part.path)
    const here = chosen !== null && (part.path === chosen || (part.parts.length > 0 && !opened && holds(part.path, chosen)))
    const last = part.nodes[part.nodes.length - 1]
    const level = part.nodes.find((node) => node.level && !part.parts.some((inner) => opened && inner.nodes.includes(node)))
    const item = h("li", { class: here ? "chosen" : "" })
    item.style.setProperty("--depth", String(depth))
    item.append(
      part.parts.length
        ? h("button", { type: "button", class: "fold", "aria-expanded": String(opened),
            "aria-label": `Parts of ${part.path}`, onclick: () => actions.toggle(part.path) })
        : h("span", { class: "fold none" }),
      h("button", { type: "button", class: "name", "aria-current": here ? "true" : null, title: part.path,
          disabled: !part.parts.length && !last.extractable, onclick: () => actions.choose(part.path) }, label),
      level ? h("span", { class: "pill" }, String(level.level)) : "",
      h("span", { class: "dim kind" }, part.parts.length ? String(part.nodes.length) : kind(last)),
    )
    return item
  }
}

/** @param {import("./model.js").NodeInfo} node @returns {Part} */
function leaf(node) {
  return { path: node.name, label: node.name, parts: [], nodes: [node] }
}

/** The type of a node: its module's class, its function or its method. @param {import("./model.js").NodeInfo} node */
export function kind(node) {
  if (node.op === "placeholder") return "input"
  const whole = node.module_type ?? node.target
  return whole.slice(whole.lastIndexOf(".") + 1)
}

/** The nodes with this in their names; where there are none, those with it in their types. @param {import("./model.js").NodeInfo[]} nodes @param {string} wanted in lower case */
export function matches(nodes, wanted) {
  const named = nodes.filter((node) => node.name.toLowerCase().includes(wanted))
  return named.length ? named : nodes.filter((node) => kind(node).toLowerCase().includes(wanted))
}

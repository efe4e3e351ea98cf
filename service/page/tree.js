// The module tree: expanded as the graph is; its rows choose nodes. Of a long tree only the rows in sight are elements.

import { h } from "./dom.js"
import { holds } from "./model.js"

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./model.js").Part} Part */
/** @typedef {{part: Part, depth: number, label: string}} Row */

/** The most nodes that a search lists. */
const MOST_FOUND = 200
/** A tree of more rows has elements for those in sight and this many above and below them. */
const MARGIN = 20
/** Where fingers need larger rows. */
const narrow = matchMedia("(max-width: 860px)")
/** Height of a row in CSS pixels, as the style has it. */
const rowHeight = () => (narrow.matches ? 44 : 24)

export class Tree {
  /** @type {Row[]} */ #rows = []
  /** @type {Set<string>} */ #open = new Set()
  /** @type {string | null} */ #chosen = null
  #wanted = ""
  #helpers = false
  #shown = ""
  /** How many nodes match what is searched for. */ #matching = 0
  /** The row that the Tab key comes to. */ #at = 0

  /**
   * @param {Model} model
   * @param {{choose: (path: string) => void, toggle: (path: string) => void}} actions
   */
  constructor(model, actions) {
    this.model = model
    this.actions = actions
    this.list = h("ul", { class: "tree plain-list", onkeydown: (/** @type {KeyboardEvent} */ event) => this.#key(event) })
    this.hidden = h("button", { type: "button", class: "quiet helpers", onclick: () => { this.#helpers = !this.#helpers; this.#relist() } })
    this.element = h("div", { class: "results", id: "tree", onscroll: () => this.#render() }, this.list, this.hidden)
    new ResizeObserver(() => this.#render()).observe(this.element)
  }

  /** @param {Set<string>} open @param {string | null} chosen the name of a node @param {string} wanted what is searched for */
  show(open, chosen, wanted) {
    const moved = chosen !== this.#chosen
    const same = open === this.#open || (open.size === this.#open.size && [...open].every((path) => this.#open.has(path)))
    this.#chosen = chosen
    if (!same || wanted !== this.#wanted || !this.#rows.length) {
      this.#open = new Set(open)
      this.#wanted = wanted
      this.#relist()
    }
    if (moved) {
      this.#at = Math.max(0, this.#rows.findIndex((row) => this.#isHere(row)))
      this.#reveal(this.#at)
    }
    this.#shown = ""
    this.#render()
  }

  /** Choose the first row, as Enter in the search does. */
  chooseFirst() {
    const first = this.#rows.find(({ part }) => chosable(part))
    if (first) this.actions.choose(first.part.path)
  }

  /** Put the keyboard's focus on the first row. */
  focus() {
    this.#move(0)
  }

  #relist() {
    const focused = this.#rows[this.#at]?.part.path
    /** @type {Row[]} */ const rows = []
    let helpers = 0
    /** @param {Part[]} parts @param {number} depth */
    const add = (parts, depth) => {
      for (const part of parts) {
        if (!chosable(part)) helpers++
        if (!chosable(part) && !this.#helpers) continue
        rows.push({ part, depth, label: part.label })
        if (part.parts.length && this.#open.has(part.path)) add(part.parts, depth + 1)
      }
    }
    const found = this.#wanted ? matches(this.model.nodes, this.#wanted) : []
    this.#matching = found.length
    if (this.#wanted) rows.push(...found.slice(0, MOST_FOUND).map((node) => ({ part: leaf(node), depth: 0, label: node.name })))
    else add(this.model.root.parts, 0)
    this.#rows = rows
    this.#at = Math.max(0, rows.findIndex(({ part }) => part.path === focused))
    this.hidden.hidden = !helpers
    this.hidden.textContent = `${helpers} ${helpers === 1 ? "helper" : "helpers"} without a tensor: ${this.#helpers ? "hide" : "show"}`
    this.#shown = ""
    this.#render()
  }

  #render() {
    const { scrollTop, clientHeight } = this.element
    const height = rowHeight()
    const long = this.#rows.length > 6 * MARGIN
    const first = long ? Math.max(0, Math.floor(scrollTop / height) - MARGIN) : 0
    const end = long ? Math.min(this.#rows.length, Math.ceil((scrollTop + (clientHeight || 800)) / height) + MARGIN) : this.#rows.length
    if (this.#shown === `${first} ${end}`) return
    this.#shown = `${first} ${end}`
    const focused = this.list.contains(document.activeElement) ? document.activeElement?.className : null
    this.list.style.setProperty("padding-top", `${first * height}px`)
    this.list.style.setProperty("padding-bottom", `${(this.#rows.length - end) * height}px`)
    this.list.replaceChildren(...this.#rows.slice(first, end).map((row, i) => this.#row(row, first + i)))
    if (!this.#rows.length) this.list.append(h("li", { class: "dim note" }, "No node of this name or type."))
    if (this.#matching > end && end === this.#rows.length) this.list.append(h("li", { class: "dim note" }, `${end} of ${this.#matching} nodes`))
    this.element.scrollTop = scrollTop
    if (focused) /** @type {HTMLElement | null | undefined} */ (this.#elementOf(this.#at)?.querySelector(`.${focused}`))?.focus({ preventScroll: true })
  }

  /** @param {Row} row */
  #isHere({ part }) {
    const chosen = this.#chosen
    return chosen !== null && (part.path === chosen || (part.parts.length > 0 && !this.#open.has(part.path) && holds(part.path, chosen)))
  }

  /** @param {Row} row @param {number} number */
  #row(row, number) {
    const { part, depth, label } = row
    const opened = this.#open.has(part.path)
    const here = this.#isHere(row)
    const last = part.nodes[part.nodes.length - 1]
    const level = part.nodes.find((node) => node.level && !part.parts.some((inner) => opened && inner.nodes.includes(node)))
    const item = h("li", { class: here ? "chosen" : "", "data-row": number })
    item.style.setProperty("--depth", String(depth))
    const reached = () => { this.#at = number }
    item.append(
      part.parts.length
        ? h("button", { type: "button", class: "fold", "aria-expanded": String(opened), tabindex: -1,
            "aria-label": `Parts of ${part.path}`, onfocus: reached, onclick: () => this.actions.toggle(part.path) })
        : h("span", { class: "fold none" }),
      h("button", { type: "button", class: "name", "aria-current": here ? "true" : null, title: part.path, tabindex: number === this.#at ? 0 : -1,
          disabled: !chosable(part), onfocus: reached, onclick: () => this.actions.choose(part.path) }, label),
      level ? h("span", { class: "pill" }, String(level.level)) : "",
      h("span", { class: "dim kind" }, part.parts.length ? String(part.nodes.length) : kind(last)),
    )
    return item
  }

  /** @param {number} number @returns {HTMLElement | null} */
  #elementOf(number) {
    return this.list.querySelector(`[data-row="${number}"]`)
  }

  /** Scroll so that a row is in sight. @param {number} number */
  #reveal(number) {
    const { scrollTop, clientHeight } = this.element
    const height = rowHeight()
    if (number * height < scrollTop) this.element.scrollTop = number * height
    else if ((number + 1) * height > scrollTop + clientHeight) this.element.scrollTop = (number + 1) * height - clientHeight
  }

  /** Focus a row. @param {number} number */
  #move(number) {
    if (!this.#rows[number]) return
    const before = this.#elementOf(this.#at)?.querySelector(".name")
    this.#at = number
    this.#reveal(number)
    this.#render()
    before?.setAttribute("tabindex", "-1")
    const name = /** @type {HTMLElement | null} */ (this.#elementOf(number)?.querySelector(".name"))
    name?.setAttribute("tabindex", "0")
    name?.focus({ preventScroll: true })
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const row = this.#rows[this.#at]
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return
    const { path, parts } = row.part
    const opened = this.#open.has(path)
    const above = this.#rows.findLastIndex(({ depth }, i) => i < this.#at && depth < row.depth)
    /** @param {number} step */
    const by = (step) => {
      let to = this.#at + step
      while (this.#rows[to] && !chosable(this.#rows[to].part)) to += step
      this.#move(to)
    }
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowDown: () => by(1), ArrowUp: () => by(-1), Home: () => this.#move(0), End: () => this.#move(this.#rows.length - 1),
      ArrowRight: () => (parts.length && !opened ? this.actions.toggle(path) : parts.length ? by(1) : undefined),
      ArrowLeft: () => (parts.length && opened ? this.actions.toggle(path) : this.#move(above)),
    }
    const action = keys[event.key]
    if (!action) return
    event.preventDefault()
    action()
  }
}

/** Whether a part can be chosen: some of what it holds gives a tensor. @param {Part} part */
const chosable = ({ parts, nodes }) => parts.length > 0 || nodes[nodes.length - 1].extractable

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

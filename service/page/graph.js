// The middle pane: the graph, collapsed to modules that expand in place.

import { Camera } from "./camera.js"
import { KNOB, draw, knob, palette } from "./drawing.js"
import { h, select } from "./dom.js"
import { makeup, repeats } from "./kinds.js"
import { Minimap } from "./minimap.js"
import { holds } from "./model.js"
import { flops, parameters, shapeText } from "./numbers.js"
import { Pictures } from "./pictures.js"
import { kind, matches } from "./tree.js"
import { followed, next } from "./walk.js"

/** @typedef {import("./drawing.js").Box} Box */
/** @typedef {import("./drawing.js").Layout} Layout */
/** @typedef {import("./model.js").Model} Model */

/** The smallest scale to begin with: text can be read. */
const LEGIBLE = 0.85
/** How long a box is chosen by keys before its output is asked for, in milliseconds. */
const REST = 250

export class GraphView {
  /** @type {Layout | null} */ layout = null
  /** @type {Model | null} */ model = null
  /** @type {string | null} */ chosen = null
  /** @type {Map<string, number> | null} milliseconds by node, once measured */ measured = null
  /** The nodes of each box: a module that is called again has another one. @type {Map<Box, import("./model.js").NodeInfo[]>} */ #inside = new Map()
  /** What each box is made of, and how many alike modules it holds. @type {import("./kinds.js").Makeup[]} */ #kinds = []
  /** @type {number[]} */ #repeats = []
  #resting = 0
  #size = { width: 0, height: 0 }
  #query = ""
  #colouring = ""
  #drawing = false
  /** The smallest scale of the last fit, and where that left the camera. */
  #fitted = { least: 0, at: "" }
  /** @type {number[] | null} */ #heat = null
  /** @type {Set<number>} */ #found = new Set()
  /** @type {Box | null} that keeps its position on the screen when the layout changes */ #anchor = null

  /**
   * @param {HTMLElement} pane
   * @param {{choose: (path: string, replace?: boolean) => void, toggle: (path: string) => void, openAll: () => void, closeAll: () => void,
   *   colour: (by: string) => void, picture: (view: string) => void, see: () => void}} actions
   */
  constructor(pane, actions) {
    this.pictures = new Pictures(() => this.redraw())
    /** What the pictures show: mean, pca, or none. */ this.shown = "mean"
    this.views = select("Pictures", [["mean", "strength"], ["pca", "PCA"], ["none", "none"]], "mean", actions.picture)
    this.actions = actions
    this.canvas = h("canvas", {
      tabindex: 0, role: "application", "aria-label": "Graph of the model", "aria-describedby": "graph-help",
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.#key(event),
    })
    this.announcement = h("p", { class: "unseen", role: "status" })
    this.legend = h("div", { class: "legend", role: "status" })
    this.card = h("div", { class: "card", hidden: true })
    /** The chosen node, on a screen that shows one pane at a time. */ this.sheet = h("div", { class: "sheet", hidden: true })
    this.note = h("div", { class: "note floating row", role: "status", hidden: true })
    this.colours = select("Colour by", [["", "kind"], ["flops", "FLOPs"], ["params", "Parameters"], ["time", "Measured time"]],
      "", actions.colour)
    pane.replaceChildren(
      h("div", { class: "toolbar" },
        h("label", {}, "Pictures ", this.views),
        h("label", {}, "Colour by ", this.colours),
        h("span", { class: "spring" }),
        h("span", { class: "tools" },
          h("button", { type: "button", onclick: actions.openAll }, "Expand all"),
          h("button", { type: "button", onclick: actions.closeAll }, "Collapse all"),
          h("button", { type: "button", "aria-label": "Zoom out", onclick: () => this.camera.zoom(1 / 1.3) }, "−"),
          h("button", { type: "button", "aria-label": "Zoom in", onclick: () => this.camera.zoom(1.3) }, "+"),
          h("button", { type: "button", onclick: () => this.fit() }, "Fit"))),
      this.canvas, this.legend, this.card, this.note, this.sheet, this.announcement,
      h("p", { class: "unseen", id: "graph-help" },
        "Up and down follow the edges, left and right the order of execution. Enter expands a module, Backspace collapses it, plus and minus zoom, 0 fits the graph."),
    )
    this.context = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"))
    this.camera = new Camera(this.canvas, () => this.redraw(), (x, y) => this.#click(x, y))
    this.minimap = new Minimap((x, y) => this.camera.centre(x, y))
    pane.append(this.minimap.element)
    this.canvas.addEventListener("dblclick", (event) => this.#doubleClick(event))
    this.canvas.addEventListener("pointermove", (event) => this.#hover(event))
    this.canvas.addEventListener("pointerleave", () => (this.card.hidden = true))
    new ResizeObserver(() => this.#resize()).observe(this.canvas)
  }

  /** @param {Model} model @param {Layout} layout @param {boolean} fresh whether it is another model's */
  show(model, layout, fresh) {
    const before = this.#anchor
    const after = before && layout.boxes.find(({ name, node }) => name === before.name && node === before.node)
    this.model = model
    this.layout = layout
    this.#anchor = null
    this.#sort(model, layout)
    this.minimap.show(layout)
    this.wait(false)
    this.#recolour()
    this.#search()
    if (fresh) {
      this.#resize()
      this.fit(LEGIBLE)
    }
    if (!fresh && before && after) this.camera.pan((before.x - after.x) * this.camera.scale, (before.y - after.y) * this.camera.scale)
    this.redraw()
  }

  /** @param {string | null} name of a node */
  choose(name) {
    this.chosen = name
    if (this.canvas.clientWidth !== this.#size.width) this.#resize() // its observer is called later
    const box = this.#chosenBox()
    if (box >= 0 && this.layout) this.camera.reveal(this.layout.boxes[box])
    const node = name && this.model?.byName.get(name)
    this.sheet.hidden = !node
    if (node) this.sheet.replaceChildren(
      h("span", {}, h("strong", {}, node.name), h("br"), `${kind(node)} · ${shapeText(node.shape)}`),
      h("button", { type: "button", class: "primary", onclick: this.actions.see }, "See output"))
    this.redraw()
  }

  /** @param {string} by flops, params, time, or empty for kinds */
  colour(by) {
    this.#colouring = by
    this.colours.value = by
    this.#recolour()
    this.redraw()
  }

  /**
   * Show the outputs of a photo in the boxes.
   * @param {import("./photo.js").Photo | null} photo null for none @param {string} view mean, pca, or none @param {import("./size.js").Query} size
   */
  picture(photo, view, size) {
    this.shown = this.views.value = view
    this.pictures.show(photo && this.model && view !== "none" ? { model: this.model, photo, view, size } : null)
    this.redraw()
  }

  /** @param {string} wanted in lower case */
  search(wanted) {
    this.#query = wanted
    this.#search()
    const first = Math.min(...this.#found)
    if (this.layout && Number.isFinite(first)) this.camera.reveal(this.layout.boxes[first])
    this.redraw()
  }

  /** Show a notice over the graph. @param {string} text empty for none @param {[string, () => void]} [action] */
  say(text, action) {
    this.note.replaceChildren(text, action ? h("button", { type: "button", onclick: action[1] }, action[0]) : "")
    this.note.hidden = !text
  }

  /** Whether another layout is being fetched. */
  get waits() {
    return this.canvas.getAttribute("aria-busy") === "true"
  }

  /** @param {boolean} busy */
  wait(busy) {
    this.canvas.setAttribute("aria-busy", String(busy))
  }

  /** Show the whole graph, or its top where that takes a scale below `least`. @param {number} [least] */
  fit(least = 0) {
    if (!this.layout) return
    this.camera.fit(this.layout.width, this.layout.height, least)
    this.#fitted = { least, at: this.camera.position }
  }

  repaint() {
    this.minimap.paint()
    this.redraw()
  }

  redraw() {
    if (this.#drawing) return
    this.#drawing = true
    requestAnimationFrame(() => {
      this.#drawing = false
      if (!this.layout) return
      const missing = draw(this.context, this.layout, this.camera, {
        colours: palette(), chosen: this.#chosenBox(), found: this.#found, heat: this.#heat, kinds: this.#kinds, repeats: this.#repeats,
        pictures: this.shown === "none" ? null : (node) => this.pictures.get(node),
      })
      if (this.shown !== "none") this.pictures.want(missing)
      this.minimap.draw(this.camera)
    })
  }

  #chosenBox() {
    const { chosen, layout } = this
    if (!chosen || !layout) return -1
    return layout.boxes.findIndex((box) => box.kind !== "frame" && this.#nodesOf(box).some(({ name }) => name === chosen))
  }

  /** @param {Box} box */
  #nodesOf(box) {
    return this.#inside.get(box) ?? []
  }

  /** Find the nodes of each box, their kinds, and alike modules. @param {Model} model @param {Layout} layout */
  #sort(model, layout) {
    const numbers = new Map(model.nodes.map(({ name }, i) => [name, i]))
    this.#inside = new Map(layout.boxes.map((box) => {
      const end = (numbers.get(box.node) ?? -1) + 1
      return [box, model.nodes.slice(Math.max(0, end - box.nodes), end)]
    }))
    this.#kinds = layout.boxes.map((box) => makeup(this.#nodesOf(box)))
    this.#repeats = layout.boxes.map((box) => {
      const module = box.kind === "module" ? model.modules.get(box.name) : undefined
      const whole = this.#nodesOf(box).filter(({ name }) => holds(box.name, name)).length === module?.nodes.length
      return whole ? repeats(module) : 1
    })
    layout.boxes.forEach((box, i) => {
      const count = this.#repeats[i]
      if (count > 1) box.lines[1] = `${count} × ${(model.modules.get(box.name)?.nodes.length ?? 0) / count} nodes`
    })
  }

  #recolour() {
    const by = this.#colouring
    this.#heat = null
    this.legend.textContent = ""
    if (!this.layout || (by === "time" && !this.measured)) return
    if (!by) return this.legend.replaceChildren(...this.#legend())
    const weights = this.layout.boxes.map((box) => {
      if (box.kind === "frame") return 0
      return this.#nodesOf(box).reduce((sum, node) => sum + (by === "flops" ? node.flops : by === "params" ? node.params
        : this.measured?.get(node.name) ?? 0), 0)
    })
    const most = Math.max(...weights, 1e-9)
    const text = by === "flops" ? flops(most) : by === "params" ? parameters(most) : `${Number(most.toPrecision(3))} ms`
    this.legend.replaceChildren(h("span", { class: "scale", "aria-hidden": "true" }), ` to ${text}`)
    this.#heat = weights.map((weight) => Math.sqrt(weight / most))
  }

  /** The kinds in sight, each by its colour. */
  #legend() {
    const found = [...new Set(this.#kinds.flatMap((one, i) => (this.layout?.boxes[i].kind === "frame" ? [] : one.map(({ kind }) => kind))))]
    return found.map(({ name, colour }) => {
      const swatch = h("span", { class: "swatch", "aria-hidden": "true" })
      swatch.style.setProperty("background", colour)
      return h("span", {}, swatch, name)
    })
  }

  #search() {
    const { layout } = this
    this.#found = new Set()
    if (!this.#query || !layout) return
    const matching = new Set(matches(this.model?.nodes ?? [], this.#query))
    layout.boxes.forEach((box, i) => {
      if (box.kind !== "frame" && this.#nodesOf(box).some((node) => matching.has(node))) this.#found.add(i)
    })
  }

  #resize() {
    const { clientWidth, clientHeight } = this.canvas
    const ratio = devicePixelRatio || 1
    const before = this.#size
    this.#size = { width: clientWidth, height: clientHeight }
    this.canvas.width = Math.round(clientWidth * ratio)
    this.canvas.height = Math.round(clientHeight * ratio)
    // It has no width while another pane is shown.
    if (clientWidth && this.#fitted.at === this.camera.position) {
      this.fit(this.#fitted.least)
      const box = this.#chosenBox()
      if (!before.width && box >= 0 && this.layout) this.camera.reveal(this.layout.boxes[box])
    } else this.camera.pan((clientWidth - before.width) / 2, (clientHeight - before.height) / 2)
    this.redraw()
  }

  /** The innermost box at a place. @param {number} x @param {number} y */
  #boxAt(x, y) {
    return this.layout?.boxes.findLast((box) => x >= box.x && x <= box.x + box.width && y >= box.y && y <= box.y + box.height)
  }

  /** @param {number} x @param {number} y */
  #click(x, y) {
    const pressed = this.layout?.boxes.findLast((box) => {
      const at = knob(box)
      return at && Math.hypot(at.x - x, at.y - y) <= KNOB + 4
    })
    if (pressed) return this.#toggle(pressed)
    const box = this.#boxAt(x, y)
    if (!box || box.kind === "frame") return
    this.actions.choose(this.#pathOf(box))
  }

  /** @param {MouseEvent} event */
  #doubleClick(event) {
    const [x, y] = this.camera.inside(event.offsetX, event.offsetY)
    const box = this.#boxAt(x, y)
    if (box && (box.kind === "module" || box.kind === "frame")) this.#toggle(box)
  }

  /** What a box is chosen by: the path of its module, if that means this call of it. @param {Box} box */
  #pathOf(box) {
    return box.kind === "module" && this.model?.resolve(box.name)?.name === box.node ? box.name : box.node
  }

  /** @param {Box} box */
  #toggle(box) {
    this.#anchor = box
    this.actions.toggle(box.name)
  }

  /** @param {PointerEvent} event */
  #hover(event) {
    const [x, y] = this.camera.inside(event.offsetX, event.offsetY)
    const box = event.buttons ? undefined : this.#boxAt(x, y)
    this.canvas.style.cursor = box && box.kind !== "frame" ? "pointer" : "grab"
    this.card.hidden = !box || box.kind === "frame"
    if (!box || this.card.hidden) return
    this.card.replaceChildren(...this.#described(box).map((line, i) => h(i ? "span" : "strong", {}, line)))
    const left = Math.min(event.offsetX + 14, this.canvas.clientWidth - this.card.offsetWidth - 8)
    this.card.style.left = `${Math.max(8, left)}px`
    this.card.style.top = `${this.canvas.offsetTop + event.offsetY + 16}px`
  }

  /** @param {Box} box */
  #described(box) {
    const nodes = this.#nodesOf(box)
    const last = this.model?.byName.get(box.node)
    if (!last) return [box.name, ...box.lines.slice(1)]
    const time = this.measured && nodes.reduce((sum, node) => sum + (this.measured?.get(node.name) ?? 0), 0)
    return [
      box.name,
      box.kind !== "module" ? kind(last) : nodes.length > 1 ? `${nodes.length} nodes` : "1 node",
      shapeText(last.shape) + (last.stride ? `, stride ${last.stride}` : ""),
      flops(nodes.reduce((sum, node) => sum + node.flops, 0)),
      parameters(nodes.reduce((sum, node) => sum + node.params, 0)),
      ...(time === null ? [] : [`${Number(time.toPrecision(3))} ms`]),
    ]
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const { layout } = this
    if (!layout || event.ctrlKey || event.metaKey || event.altKey) return
    const here = this.#chosenBox()
    /** @type {Record<string, () => void>} */
    const keys = {
      "+": () => this.camera.zoom(1.3), "=": () => this.camera.zoom(1.3), "-": () => this.camera.zoom(1 / 1.3),
      0: () => this.fit(),
      Enter: () => here >= 0 && layout.boxes[here].kind === "module" && this.#toggle(layout.boxes[here]),
      Backspace: () => this.#leave(here),
      ArrowDown: () => this.#moveTo(followed(layout, here, 1)), ArrowUp: () => this.#moveTo(followed(layout, here, -1)),
      ArrowRight: () => this.#moveTo(next(layout, here, 1)), ArrowLeft: () => this.#moveTo(next(layout, here, -1)),
    }
    const action = keys[event.key]
    if (!action) return
    event.preventDefault()
    action()
  }

  /** Close the module that holds a box. @param {number} from */
  #leave(from) {
    const name = this.layout?.boxes[from]?.name
    const frame = name && this.layout?.boxes.findLast((box) => box.kind === "frame" && holds(box.name, name))
    if (frame) this.#toggle(frame)
  }

  /** @param {number} number -1 for no box */
  #moveTo(number) {
    const box = this.layout?.boxes[number]
    if (!box) return
    this.announcement.textContent = this.#described(box).join(", ")
    this.choose(box.node)
    // What is passed on the way is not asked for.
    clearTimeout(this.#resting)
    this.#resting = setTimeout(() => this.actions.choose(this.#pathOf(box), true), REST)
  }
}

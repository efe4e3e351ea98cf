// The whole graph in a corner, with the part that is in sight.

import { h } from "./dom.js"
import { palette } from "./drawing.js"

/** @typedef {import("./drawing.js").Layout} Layout */

const WIDTH = 120
const HEIGHT = 170

export class Minimap {
  /** @type {Layout | null} */ #layout = null
  #scale = 1

  /** @param {(x: number, y: number) => void} moved to a place in the drawing's pixels */
  constructor(moved) {
    // By mouse and finger only: keys move the graph itself.
    this.element = h("canvas", { class: "minimap", hidden: true, "aria-hidden": "true" })
    /** @param {PointerEvent} event */
    const go = (event) => moved(event.offsetX / this.#scale, event.offsetY / this.#scale)
    this.element.addEventListener("pointerdown", (event) => { this.element.setPointerCapture(event.pointerId); go(event) })
    this.element.addEventListener("pointermove", (event) => { if (this.element.hasPointerCapture(event.pointerId)) go(event) })
    this.boxes = h("canvas", {})
  }

  /** @param {Layout} layout */
  show(layout) {
    this.#layout = layout
    this.#scale = Math.min(WIDTH / layout.width, HEIGHT / layout.height)
    const ratio = devicePixelRatio || 1
    for (const canvas of [this.element, this.boxes]) {
      canvas.width = Math.max(1, Math.round(layout.width * this.#scale * ratio))
      canvas.height = Math.max(1, Math.round(layout.height * this.#scale * ratio))
    }
    this.element.style.setProperty("width", `${layout.width * this.#scale}px`)
    this.paint()
  }

  paint() {
    const context = this.boxes.getContext("2d")
    if (!context || !this.#layout) return
    const share = this.boxes.width / this.#layout.width
    context.clearRect(0, 0, this.boxes.width, this.boxes.height)
    context.fillStyle = palette().arrow
    for (const { kind, x, y, width, height } of this.#layout.boxes)
      if (kind !== "frame") context.fillRect(x * share, y * share, Math.max(1, width * share), Math.max(0.5, height * share))
  }

  /** @param {import("./camera.js").Camera} camera */
  draw({ x, y, scale, canvas }) {
    const layout = this.#layout
    const context = this.element.getContext("2d")
    if (!layout || !context) return
    const { clientWidth, clientHeight } = canvas
    const whole = x >= 0 && y >= 0 && x + layout.width * scale <= clientWidth && y + layout.height * scale <= clientHeight
    this.element.hidden = whole
    if (whole) return
    const share = (this.#scale * (devicePixelRatio || 1)) / scale
    const colours = palette()
    context.clearRect(0, 0, this.element.width, this.element.height)
    context.drawImage(this.boxes, 0, 0)
    context.fillStyle = colours.accent
    context.globalAlpha = 0.14
    context.fillRect(-x * share, -y * share, clientWidth * share, clientHeight * share)
    context.globalAlpha = 1
    context.strokeStyle = colours.accent
    context.lineWidth = 2
    context.strokeRect(-x * share, -y * share, clientWidth * share, clientHeight * share)
  }
}

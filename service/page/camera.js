// Pan and zoom by mouse, touch and keys.

/** Zooming out ends here, or where a larger drawing fits. */
const LEAST_SCALE = 0.04
const MOST_SCALE = 3
const CLICK_DISTANCE = 4

export class Camera {
  x = 0
  y = 0
  scale = 1

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {() => void} moved
   * @param {(x: number, y: number) => void} clicked in the drawing's pixels
   */
  constructor(canvas, moved, clicked) {
    this.canvas = canvas
    this.moved = moved
    this.clicked = clicked
    /** @type {Map<number, {x: number, y: number}>} */
    this.pointers = new Map()
    this.distance = 0
    canvas.addEventListener("pointerdown", (event) => this.#down(event))
    canvas.addEventListener("pointermove", (event) => this.#move(event))
    canvas.addEventListener("pointerup", (event) => this.#up(event, true))
    canvas.addEventListener("pointercancel", (event) => this.#up(event, false))
    canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false })
  }

  /** Where it is, to be compared with where it was. */
  get position() {
    return [this.x, this.y, this.scale].join(" ")
  }

  /** A place on the canvas in the drawing's pixels. @param {number} x @param {number} y */
  inside(x, y) {
    return [(x - this.x) / this.scale, (y - this.y) / this.scale]
  }

  /** Zoom by a factor, keeping a place of the canvas where it is. @param {number} factor @param {number} [x] @param {number} [y] */
  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const scale = Math.min(MOST_SCALE, Math.max(Math.min(LEAST_SCALE, this.scale), this.scale * factor))
    this.x = x - ((x - this.x) * scale) / this.scale
    this.y = y - ((y - this.y) * scale) / this.scale
    this.scale = scale
    this.moved()
  }

  /** @param {number} x @param {number} y */
  pan(x, y) {
    this.x += x
    this.y += y
    this.moved()
  }

  /**
   * Show a drawing of that size as a whole; where that takes a scale below `least`, the middle of its top.
   * @param {number} width @param {number} height @param {number} [least]
   */
  fit(width, height, least = 0) {
    const { clientWidth, clientHeight } = this.canvas
    const wanted = Math.min(clientWidth / width, clientHeight / height, 1.25)
    this.scale = Math.max(wanted, least)
    this.x = (clientWidth - width * this.scale) / 2
    this.y = Math.max(0, (clientHeight - height * this.scale) / 2)
    this.moved()
  }

  /** Pan so that a place of the drawing is in the middle. @param {number} x @param {number} y */
  centre(x, y) {
    this.x = this.canvas.clientWidth / 2 - x * this.scale
    this.y = this.canvas.clientHeight / 2 - y * this.scale
    this.moved()
  }

  /** Pan so that a box is in sight. @param {{x: number, y: number, width: number, height: number}} box */
  reveal({ x, y, width, height }) {
    const { clientWidth, clientHeight } = this.canvas
    if (!clientWidth) return // another pane is shown
    const left = x * this.scale + this.x, top = y * this.scale + this.y
    const inside = left >= 0 && top >= 0 && left + width * this.scale <= clientWidth && top + height * this.scale <= clientHeight
    if (inside) return
    this.pan(clientWidth / 2 - (left + (width * this.scale) / 2), clientHeight / 2 - (top + (height * this.scale) / 2))
  }

  /** @param {PointerEvent} event */
  #down(event) {
    this.canvas.setPointerCapture(event.pointerId)
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY })
    if (this.pointers.size === 1) this.distance = 0
  }

  /** @param {PointerEvent} event */
  #move(event) {
    const before = this.pointers.get(event.pointerId)
    if (!before) return
    const now = { x: event.offsetX, y: event.offsetY }
    this.distance += Math.abs(now.x - before.x) + Math.abs(now.y - before.y)
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1]
    this.pointers.set(event.pointerId, now)
    if (other) {
      const factor = Math.hypot(now.x - other.x, now.y - other.y) / Math.hypot(before.x - other.x, before.y - other.y)
      this.pan((now.x - before.x) / 2, (now.y - before.y) / 2)
      if (Number.isFinite(factor) && factor > 0) this.zoom(factor, (now.x + other.x) / 2, (now.y + other.y) / 2)
    } else if (this.distance > CLICK_DISTANCE) this.pan(now.x - before.x, now.y - before.y)
  }

  /** @param {PointerEvent} event @param {boolean} lifted */
  #up(event, lifted) {
    const alone = this.pointers.size === 1
    this.pointers.delete(event.pointerId)
    if (!lifted || !alone || this.distance > CLICK_DISTANCE) return
    const [x, y] = this.inside(event.offsetX, event.offsetY)
    this.clicked(x, y)
  }

  /** @param {WheelEvent} event */
  #wheel(event) {
    event.preventDefault()
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-event.deltaY / 150), event.offsetX, event.offsetY)
    else this.pan(-event.deltaX, -event.deltaY)
  }
}

// The graph on its canvas: boxes within boxes, and arrows between them. Only what is visible is drawn.

import { colour } from "./colours.js"

/**
 * @typedef {object} Box
 * @property {string} name
 * @property {string} node
 * @property {number} nodes
 * @property {string} kind
 * @property {string[]} lines
 * @property {string | null} mark
 * @property {boolean} picture whether there is a square for one at its right end
 * @property {number} x
 * @property {number} y
 * @property {number} width
 * @property {number} height
 */

/**
 * @typedef {object} Layout
 * @property {number} width
 * @property {number} height
 * @property {Box[]} boxes
 * @property {{source: number, target: number, points: [number, number][]}[]} edges
 */

/** Below this scale text could not be read and is left out. */
const READABLE = 0.4
const FONT = "11px ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
const LINE = 14
/** Below this height of a box on the screen its picture would be a dot, and is left out. */
const LEAST_PICTURE = 12
const PADDING = 8
const RADIUS = 5
/** Radius of the button that expands and collapses a module. */
export const KNOB = 7

/** The middle of a box's expand or collapse button. @param {Box} box */
export function knob(box) {
  if (box.kind !== "module" && box.kind !== "frame") return null
  return { x: box.x + box.width, y: box.kind === "frame" ? box.y + 12 : box.y + box.height / 2 }
}

/** The colours of the page's style. */
export function palette() {
  const style = getComputedStyle(document.documentElement)
  /** @param {string} name */
  const of = (name) => style.getPropertyValue(`--${name}`).trim()
  return {
    surface: of("surface"), frame: of("frame"), line: of("box-line"), arrow: of("arrow"), text: of("text"),
    dim: of("dim"), accent: of("accent"), soft: of("accent-soft"), on: of("on-accent"), background: of("background"),
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Layout} layout
 * @param {{x: number, y: number, scale: number}} camera
 * @param {object} options
 * @param {ReturnType<typeof palette>} options.colours
 * @param {number} options.chosen number of a box, or -1
 * @param {Set<number>} options.found boxes that match the search
 * @param {number[] | null} options.heat share of each box, 0 to 1; null where boxes have the colours of their kinds
 * @param {import("./kinds.js").Makeup[]} options.kinds of each box
 * @param {number[]} options.repeats how many alike modules each box holds
 * @param {((node: string) => HTMLCanvasElement | null | undefined) | null} options.pictures
 * @returns {string[]} the nodes in sight whose pictures are not there yet, the nearest to the middle first
 */
export function draw(context, layout, camera, { colours, chosen, found, heat, kinds, repeats, pictures }) {
  const ratio = devicePixelRatio || 1
  const { canvas } = context
  context.setTransform(1, 0, 0, 1, 0, 0)
  context.clearRect(0, 0, canvas.width, canvas.height)
  context.setTransform(ratio * camera.scale, 0, 0, ratio * camera.scale, ratio * camera.x, ratio * camera.y)
  const top = -camera.y / camera.scale, bottom = top + canvas.height / ratio / camera.scale
  const left = -camera.x / camera.scale, right = left + canvas.width / ratio / camera.scale
  /** @param {Box} box */
  const visible = (box) => box.y < bottom && box.y + box.height > top && box.x - 60 < right && box.x + box.width + 60 > left
  const readable = camera.scale >= READABLE
  /** @type {Box[]} */ const missing = []
  context.font = FONT
  context.textBaseline = "alphabetic"
  for (const box of layout.boxes) if (box.kind === "frame" && visible(box)) drawFrame(context, box, colours, readable)
  context.lineWidth = 1.2
  for (const adjacent of [false, true]) {
    context.strokeStyle = context.fillStyle = adjacent ? colours.accent : colours.arrow
    for (const { source, target, points } of layout.edges) {
      const last = points[points.length - 1]
      if (adjacent !== (source === chosen || target === chosen) || points[0][1] > bottom || last[1] < top) continue
      drawArrow(context, points, readable)
    }
  }
  layout.boxes.forEach((box, i) => {
    if (!visible(box)) return
    if (box.kind === "module" && repeats[i] > 1) drawStack(context, box, colours)
    if (box.kind !== "frame") drawBox(context, box, colours, readable, heat ? heat[i] : kinds[i])
    if (box.picture && pictures && box.height * camera.scale >= LEAST_PICTURE) {
      const shown = pictures(box.node)
      drawPicture(context, box, shown, colours)
      if (shown === undefined) missing.push(box)
    }
    if (i === chosen || found.has(i)) outline(context, box, i === chosen ? colours.accent : colours.text, (i === chosen ? 2.5 : 1.5) / Math.min(1, camera.scale / READABLE))
    if (readable) drawKnob(context, box, colours)
  })
  if (!readable) drawNames(context, layout.boxes.filter(visible), camera.scale, colours)
  const middle = (top + bottom) / 2
  return missing.sort((one, other) => Math.abs(one.y - middle) - Math.abs(other.y - middle)).map((box) => box.node)
}

/** Names of one size at every zoom, those of frames first, as far as they do not overlap. @param {CanvasRenderingContext2D} context @param {Box[]} boxes @param {number} scale @param {ReturnType<typeof palette>} colours */
function drawNames(context, boxes, scale, colours) {
  const line = LINE / scale
  /** @type {Array<[left: number, top: number, right: number]>} */ const taken = []
  context.font = FONT.replace("11px", `${11 / scale}px`)
  for (const box of [...boxes].sort((one, other) => other.height - one.height)) {
    if (box.height < (box.kind === "frame" ? 2 : 0.8) * line) continue
    const text = box.kind === "frame" ? box.name : box.lines[0]
    const width = context.measureText(text).width
    // Beside what they name: frames' on the left, boxes' on the right.
    const [left, top] = box.kind === "frame" ? [box.x - width - PADDING / scale, box.y] : [box.x + box.width + PADDING / scale, box.y + box.height / 2 - line / 2]
    if (taken.some(([x, y, right]) => Math.abs(y - top) < line && left < right && left + width > x)) continue
    taken.push([left, top, left + width])
    context.globalAlpha = 0.85
    context.fillStyle = colours.background
    context.fillRect(left, top, width + 4 / scale, line)
    context.globalAlpha = 1
    context.fillStyle = box.kind === "frame" ? colours.text : colours.dim
    context.fillText(text, left + 2 / scale, top + line * 0.78)
  }
}

/** @param {CanvasRenderingContext2D} context @param {Box} box @param {HTMLCanvasElement | null | undefined} shown @param {ReturnType<typeof palette>} colours */
function drawPicture(context, box, shown, colours) {
  if (shown === null) return
  const side = box.height - PADDING
  const x = box.x + box.width - side - PADDING / 2 - KNOB / 2, y = box.y + PADDING / 2
  if (!shown) {
    context.fillStyle = colours.frame
    context.fillRect(x, y, side, side)
    return
  }
  const share = side / Math.max(shown.width, shown.height)
  const width = shown.width * share, height = shown.height * share
  context.imageSmoothingEnabled = shown.width > side
  context.drawImage(shown, x + (side - width) / 2, y + (side - height) / 2, width, height)
}

/** @param {CanvasRenderingContext2D} context @param {Box} box @param {ReturnType<typeof palette>} colours @param {boolean} readable */
function drawFrame(context, box, colours, readable) {
  rounded(context, box, 8)
  context.fillStyle = colours.frame
  context.fill()
  context.lineWidth = 1
  context.strokeStyle = colours.line
  context.stroke()
  if (!readable) return
  context.fillStyle = colours.dim
  context.fillText(box.lines[0], box.x + PADDING, box.y + LINE + 2)
}

/** The edges of two boxes behind one. @param {CanvasRenderingContext2D} context @param {Box} box @param {ReturnType<typeof palette>} colours */
function drawStack(context, box, colours) {
  context.lineWidth = 1
  for (const by of [6, 3]) {
    rounded(context, { ...box, x: box.x + by, y: box.y - by }, RADIUS)
    context.fillStyle = colours.surface
    context.fill()
    context.strokeStyle = colours.line
    context.stroke()
  }
}

/** A box with a share of some cost, 0 to 1, or with the kinds of what it holds. @param {CanvasRenderingContext2D} context @param {Box} box @param {ReturnType<typeof palette>} colours @param {boolean} readable @param {number | import("./kinds.js").Makeup} of */
function drawBox(context, box, colours, readable, of) {
  rounded(context, box, RADIUS)
  // Without its text a white box on white could not be seen.
  context.fillStyle = readable ? colours.surface : colours.dim
  context.fill()
  if (typeof of !== "number" || of) {
    context.save()
    context.clip()
    if (typeof of === "number") tint(context, box, colour(0.25 + 0.6 * of), readable ? 0.12 + 0.3 * of : 1)
    else
      for (let i = 0, y = box.y; i < of.length; y += of[i++].share * box.height)
        tint(context, { ...box, y, height: of[i].share * box.height }, of[i].kind.colour, readable ? 0.07 : 1)
    context.restore()
  }
  context.lineWidth = box.kind === "module" ? 1.4 : 1
  context.strokeStyle = colours.line
  context.stroke()
  if (!readable) return
  box.lines.forEach((line, i) => {
    context.fillStyle = i ? colours.dim : colours.text
    context.fillText(line, box.x + PADDING, box.y + (i + 1) * LINE + 1)
  })
  if (!box.mark) return
  const x = box.x + box.width + (box.kind === "module" ? KNOB + 5 : 6), y = box.y + box.height / 2
  const width = box.mark.length * 7 + 8
  context.beginPath()
  context.roundRect(x, y - 8, width, 16, 8)
  context.fillStyle = colours.accent
  context.fill()
  context.fillStyle = colours.on
  context.fillText(box.mark, x + 4, y + 4)
}

/** Colour a part of a box, its left edge most. @param {CanvasRenderingContext2D} context @param {{x: number, y: number, width: number, height: number}} part @param {string} colour @param {number} opacity */
function tint(context, { x, y, width, height }, colour, opacity) {
  context.fillStyle = colour
  context.globalAlpha = opacity
  context.fillRect(x, y, width, height)
  context.globalAlpha = 1
  context.fillRect(x, y, 4, height)
}

/** @param {CanvasRenderingContext2D} context @param {Box} box @param {ReturnType<typeof palette>} colours */
function drawKnob(context, box, colours) {
  const at = knob(box)
  if (!at) return
  context.beginPath()
  context.arc(at.x, at.y, KNOB, 0, 2 * Math.PI)
  context.fillStyle = colours.surface
  context.fill()
  context.lineWidth = 1
  context.strokeStyle = colours.line
  context.stroke()
  context.beginPath()
  context.moveTo(at.x - 3, at.y)
  context.lineTo(at.x + 3, at.y)
  if (box.kind === "module") {
    context.moveTo(at.x, at.y - 3)
    context.lineTo(at.x, at.y + 3)
  }
  context.lineWidth = 1.3
  context.strokeStyle = colours.dim
  context.stroke()
}

/** @param {CanvasRenderingContext2D} context @param {[number, number][]} points @param {boolean} readable */
function drawArrow(context, points, readable) {
  const [[startX, startY], ...others] = points
  const [endX, endY] = others[others.length - 1]
  context.beginPath()
  context.moveTo(startX, startY)
  if (others.length === 1) {
    const bend = (startY + endY) / 2
    context.bezierCurveTo(startX, bend, endX, bend, endX, endY)
  } else for (const [x, y] of others) context.lineTo(x, y)
  context.stroke()
  if (!readable) return
  context.beginPath()
  context.moveTo(endX, endY)
  context.lineTo(endX - 3.5, endY - 6)
  context.lineTo(endX + 3.5, endY - 6)
  context.fill()
}

/** @param {CanvasRenderingContext2D} context @param {Box} box @param {string} colour @param {number} width */
function outline(context, box, colour, width) {
  rounded(context, box, box.kind === "frame" ? 8 : RADIUS)
  context.lineWidth = width
  context.strokeStyle = colour
  context.stroke()
}

/** @param {CanvasRenderingContext2D} context @param {{x: number, y: number, width: number, height: number}} box @param {number} radius */
function rounded(context, { x, y, width, height }, radius) {
  context.beginPath()
  context.roundRect(x, y, width, height, radius)
}

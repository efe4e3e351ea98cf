// Positions of a map: from the URL, under the pointer, and chosen by clicks and arrow keys.

/** @typedef {{height: number, width: number}} Size */
/** @typedef {{row: number, column: number, of?: {row: number, column: number} & Size}} Patch and the one of another map whose position it has */

/** @type {Record<string, [number, number]>} */
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }

/** The patch that the URL names, else the middle one. @param {string | undefined} at @param {Size} size @returns {Patch} */
export function patchOf(at, { height, width }) {
  const [row, column] = (at ?? "").split(",").map(Number)
  const known = at !== undefined && Number.isInteger(row) && Number.isInteger(column) && row >= 0 && row < height && column >= 0 && column < width
  return known ? { row, column } : { row: Math.floor(height / 2), column: Math.floor(width / 2) }
}

/**
 * The patch of another map at the same position: that of the map that was pointed at first, so that all maps agree on their patches.
 * @param {Patch} patch @param {Size} from @param {Size} to @returns {Patch}
 */
export function patchAlike({ row, column, of }, { height, width }, to) {
  of ??= { row, column, height, width }
  return { row: Math.floor(((of.row + 0.5) * to.height) / of.height), column: Math.floor(((of.column + 0.5) * to.width) / of.width), of }
}

/** @param {PointerEvent | MouseEvent} event @param {Size} size @returns {Patch} */
export function patchUnder(event, { height, width }) {
  const { clientWidth, clientHeight } = /** @type {HTMLElement} */ (event.currentTarget)
  return {
    row: within(Math.floor((event.offsetY / clientHeight) * height), height),
    column: within(Math.floor((event.offsetX / clientWidth) * width), width),
  }
}

/** @param {number} index @param {number} size */
const within = (index, size) => Math.min(size - 1, Math.max(0, index))

/**
 * Have a patch chosen by clicks and arrow keys.
 * @param {HTMLCanvasElement} canvas @param {Size} size @param {Patch} chosen @param {(patch: Patch) => void} choose
 */
export function choosePatch(canvas, size, chosen, choose) {
  canvas.classList.add("pickable")
  canvas.tabIndex = 0
  canvas.setAttribute("role", "application")
  canvas.setAttribute("aria-description", `Row ${chosen.row}, column ${chosen.column}: arrow keys choose another position`)
  let at = chosen // until this canvas is replaced by one of the place that was chosen
  canvas.addEventListener("click", (event) => choose(at = patchUnder(event, size)))
  canvas.addEventListener("keydown", (event) => {
    const step = STEPS[event.key]
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return
    event.preventDefault()
    choose(at = { row: within(at.row + step[0], size.height), column: within(at.column + step[1], size.width) })
  })
}

// Steps over the graph from box to box, for the keyboard.

/** @typedef {import("./drawing.js").Box} Box */
/** @typedef {import("./drawing.js").Layout} Layout */

/**
 * The box that an edge leads to, in and out of frames; without one the next in order of execution. -1 at an end.
 * @param {Layout} layout @param {number} from @param {number} direction 1 along the edges, -1 against them
 */
export function followed(layout, from, direction) {
  const { boxes, edges } = layout
  const seen = new Set([`${from}`])
  let ends = [from]
  /** @type {Map<number, boolean>} whether one came to a frame from what it holds */
  let outwards = new Map()
  while (ends.length) {
    /** @type {typeof outwards} */
    const after = new Map()
    for (const { source, target } of edges) {
      const [start, end] = direction > 0 ? [source, target] : [target, source]
      if (!ends.includes(start)) continue
      // An edge between a frame and what it holds is inside of it.
      const inside = boxes[start].kind === "frame" && within(boxes[start], boxes[end])
      if (boxes[start].kind === "frame" && inside === outwards.get(start)) continue
      const outward = boxes[end].kind === "frame" && within(boxes[end], boxes[start])
      if (boxes[end].kind !== "frame") return end
      if (!seen.has(`${end} ${outward}`)) after.set(end, outward)
      seen.add(`${end} ${outward}`)
    }
    ends = [...after.keys()]
    outwards = after
  }
  return next(layout, from, direction)
}

/** The next box in order of execution, or the one before; -1 at an end. @param {Layout} layout @param {number} from @param {number} direction */
export function next({ boxes }, from, direction) {
  let number = from + direction
  while (boxes[number]?.kind === "frame") number += direction
  return boxes[number] ? number : -1
}

/** Whether a frame lies around a box. @param {Box} frame @param {Box} box */
function within(frame, box) {
  return box.x >= frame.x && box.y >= frame.y && box.x + box.width <= frame.x + frame.width && box.y + box.height <= frame.y + frame.height
}

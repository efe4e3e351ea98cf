// A map over a photo, with a readout of the value under the pointer or, for maps that have a query position, of its map.

import { range } from "./colours.js"
import { h } from "./dom.js"
import { short } from "./numbers.js"
import { choosePatch, patchUnder } from "./patch.js"
import { isStale } from "./reductions.js"
import { legend, stage } from "./stage.js"
import { reason } from "./states.js"

/** @typedef {import("./patch.js").Patch} Patch */

/**
 * A map as an image, and where it is no RGB its values, one a pixel, how much of each is to be seen, and its scale.
 * @typedef {{image: ImageData, values: Float32Array | null, weights: Float32Array | null, scale: import("./colours.js").Range | null}} Rendering
 */

/**
 * @typedef {object} Shown
 * @property {import("./photo.js").Photo} photo
 * @property {any} preprocessing
 * @property {string} label
 * @property {string} caption
 * @property {number} opacity
 * @property {{height: number, width: number}} size of the map
 * @property {(patch: Patch | null, topic: string) => Promise<Rendering>} render the map, relative to the query patch where there is one; only
 *   the last of those that wait under a topic is rendered
 * @property {Patch | null} patch the query
 * @property {(patch: Patch | null) => void} point the patch under the pointer; null once it has left
 * @property {(patch: Patch) => void} choose
 */

let panels = 0

/** @param {Shown} shown */
export async function panel({ photo, preprocessing, label, caption, opacity, size, render, patch, point, choose }) {
  const { canvas, paint } = stage(photo, preprocessing, label)
  const readout = h("span", { class: "readout" })
  const topic = `panel ${++panels}`
  let now = await render(patch, topic), at = patch, asked = 0
  const bar = h("div", { class: "colour-bar" })
  const repaint = () => {
    paint(now, opacity, at)
    bar.replaceChildren(now.scale ? legend(now.scale) : "")
  }
  repaint()
  if (patch) read(patch)

  /** Show the map of another patch, unless the pointer has moved on meanwhile. @param {Patch} other */
  async function ask(other) {
    const mine = ++asked
    const same = JSON.stringify(other) === JSON.stringify(at)
    const found = same ? now : await render(other, topic).catch((error) => {
      if (!isStale(error) && mine === asked) readout.textContent = reason(error)
    })
    if (!found || mine !== asked) return
    now = found
    at = other
    repaint()
    read(other)
  }

  /** Its value; for a query patch, the range of the map. @param {Patch} under */
  function read({ row, column }) {
    const { values } = now
    const { low, high } = range(values && patch ? values : new Float32Array())
    const said = !values ? "" : patch ? `: ${short(low)} to ${short(high)}` : `: ${short(values[row * size.width + column])}`
    readout.textContent = `${row}, ${column}${said}`
  }

  canvas.addEventListener("pointermove", (event) => point(patchUnder(event, size)))
  canvas.addEventListener("pointerleave", () => point(null))
  if (patch) choosePatch(canvas, size, patch, choose)
  return {
    figure: h("figure", {}, canvas, bar, h("figcaption", {}, h("span", {}, caption), readout)),
    /** @param {number} share */
    fade(share) {
      if (share === opacity) return
      opacity = share
      repaint()
    },
    /** Show the value of a patch, or the map relative to it. @param {Patch | null} under */
    point(under) {
      if (patch) ask(under ?? patch)
      else if (under) read(under)
      else readout.textContent = ""
    },
  }
}

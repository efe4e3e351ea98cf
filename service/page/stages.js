// Photos side by side, each with a map over it; they share the pointer's position.

import { severalModels, titleOf } from "./comparison.js"
import { h } from "./dom.js"
import { panel } from "./panel.js"
import { patchAlike, patchOf } from "./patch.js"
import { isStale } from "./reductions.js"
import { preprocessingAt } from "./size.js"
import { reason } from "./states.js"

/** @typedef {import("./patch.js").Patch} Patch */

/**
 * A photo and a map of it, or why there is none.
 * @typedef {object} Mapped
 * @property {import("./photo.js").Photo} photo
 * @property {import("./model.js").Model} model
 * @property {string} node whose output the map shows
 * @property {string} label what the map shows
 * @property {boolean} edited whether the photo's values were edited on the way
 * @property {string} caption the same, where there is one map only
 * @property {{height: number, width: number}} size of the map
 * @property {boolean} query whether the map is relative to one position, the query
 * @property {(patch: Patch | null, topic: string) => Promise<import("./panel.js").Rendering>} render
 *
 * @typedef {Mapped | {note: string}} Side
 */

/** Of the maps over the photos; kept while other nodes are chosen. */
let opacity = 0.8
/** Fades the maps that were made last: until they are in the page, the slider of those before them is the one that is moved. */
let fadeLast = () => {}

/** A button that gives the maps the whole window, and gives it back. */
function enlarge() {
  const button = h("button", { type: "button", "aria-pressed": String(document.body.classList.contains("enlarged")),
    onclick: () => button.setAttribute("aria-pressed", String(document.body.classList.toggle("enlarged"))) }, "Enlarge")
  return button
}

addEventListener("keydown", ({ key }) => {
  if (key !== "Escape" || !document.body.classList.contains("enlarged")) return
  document.body.classList.remove("enlarged")
  document.querySelector(".over [aria-pressed=true]")?.setAttribute("aria-pressed", "false")
})

/**
 * What there is of each answer; of several, the reason where one failed.
 * @template {object} T
 * @param {import("./answers.js").Answer[]} answers @param {(answer: import("./answers.js").Answer, number: number) => Promise<T | {note: string}>} find
 * @returns {Promise<(T | {note: string})[]>}
 */
export const eachSide = (answers, find) => Promise.all(answers.map((one, i) => find(one, i).catch((error) => {
  if (answers.length === 1 || isStale(error)) throw error
  return { note: reason(error) }
})))

/**
 * @param {Side[]} sides
 * @param {import("./size.js").Query} query
 * @param {string | undefined} at the chosen position on the first map, as row,column
 * @param {(at: string) => void} choose
 */
export async function stages(sides, query, at, choose) {
  const mapped = sides.filter((side) => "photo" in side)
  const alone = sides.length === 1
  const several = severalModels(mapped)
  /** @param {Mapped} side */
  const of = ({ node, model }) => (several ? `${node} of ${titleOf(model)}` : node)
  const chosen = mapped.length ? patchOf(at, mapped[0].size) : { row: 0, column: 0 }
  /** @param {number} from @param {Patch | null} patch */
  const point = (from, patch) => panels.forEach((one, i) => one.point(patch && patchAlike(patch, mapped[from].size, mapped[i].size)))
  const panels = await Promise.all(mapped.map((side, i) => panel({
    ...side, preprocessing: preprocessingAt(side.model, query), opacity,
    label: `${side.label} of ${of(side)} over ${side.photo.title}${side.edited ? ", edited" : ""}`,
    caption: alone ? side.caption : `${several ? "" : `${side.photo.title}, `}${of(side)}${side.edited ? ", edited" : ""}`,
    patch: side.query ? patchAlike(chosen, mapped[0].size, side.size) : null,
    point: (patch) => point(i, patch),
    choose: (patch) => {
      const { row, column } = patchAlike(patch, side.size, mapped[0].size)
      choose(`${row},${column}`)
    },
  })))
  const slider = h("input", { type: "range", min: 0, max: 1, step: 0.05, "aria-label": "Opacity of the map",
    oninput: () => {
      opacity = Number(slider.value)
      fadeAll()
      fadeLast()
    } })
  const fadeAll = () => {
    slider.value = String(opacity)
    for (const { fade } of panels) fade(opacity)
  }
  fadeAll() // the slider of the maps before these may have been moved meanwhile
  fadeLast = fadeAll
  const shown = sides.map((side) => ("note" in side ? h("p", { class: "note" }, side.note) : panels[mapped.indexOf(side)].figure))
  return h("div", { class: "over" }, h("div", { class: "stages" }, ...shown), mapped.length
    ? h("div", { class: "row dim" }, h("label", { class: "row spring" }, "Map opacity", slider), enlarge()) : null)
}

// The attention of each head: where one place of the image looks.

import { attention, attentionNodes } from "./answers.js"
import { h, select } from "./dom.js"
import { modulesAbove } from "./model.js"
import { panel } from "./panel.js"
import { patchOf } from "./patch.js"
import { reduce } from "./reductions.js"
import { coloured } from "./views.js"

/** @typedef {import("./answers.js").Answer} Answer */
/** @typedef {import("./model.js").Model} Model */

/**
 * The attention that is nearest to a node: of the same block, else the last one before it, else the first.
 * @param {Model} model @param {string} name
 * @returns {Promise<string | null>}
 */
export async function attentionNear(model, name) {
  const { names, order } = await attentionNodes(model)
  const here = modulesAbove(name)
  /** @param {string} other */
  const shared = (other) => modulesAbove(other).filter((module) => here.includes(module)).length
  const at = order.indexOf(name)
  const before = names.filter((other) => order.indexOf(other) <= at)
  const most = Math.max(...names.map(shared))
  const block = names.filter((other) => shared(other) === most)
  if (block.length === 1 || !before.length) return block[0] ?? null
  return before[before.length - 1]
}

/**
 * @param {Model} model
 * @param {string} name of a node of attention weights
 * @param {Answer} first whose photo it is
 * @param {import("./place.js").Place} place
 * @param {{go: (changes: Record<string, string | null>, replace?: boolean) => void, opacity: number, signal: AbortSignal}} options
 */
export async function attentionView(model, name, first, place, { go, opacity, signal }) {
  const { grid, shape } = await attention(model, name, first.photo, signal)
  if (!grid) return { block: h("p", { class: "note" }, `Which places the weights of ${name}, ${shape.join(" × ")}, are of cannot be told.`), fade() {} }
  const heads = shape[shape.length - 3]
  const head = Number(place.head) < heads ? Number(place.head) : null
  const label = head === null ? "Mean of all heads" : `Head ${head}`
  const { figure, fade } = await panel({
    photo: first.photo, preprocessing: model.preprocessing, opacity, size: grid, patch: patchOf(place.at, grid),
    label: `${label} of ${name} over ${first.photo.name}`, caption: `${label} of ${name}`,
    look: async (patch) => coloured(await reduce("attention", { slot: "attention", head, grid, ...patch }), grid.width),
    choose: ({ row, column }) => go({ at: `${row},${column}` }, true),
  })
  const choices = /** @type {Array<[string, string]>} */ ([["", "Mean of all heads"], ...[...Array(heads).keys()].map((i) => [String(i), `Head ${i}`])])
  const block = h("div", {}, h("div", { class: "stages" }, figure),
    select("Head", choices, head === null ? "" : String(head), (value) => go({ head: value || null }, true)),
    h("p", { class: "dim" }, "Point at a place: where does it look? A click or the arrow keys keep it."))
  return { block, fade }
}

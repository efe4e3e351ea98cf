// Turning knobs: channels, positions or heads of nodes are switched off or scaled, and what comes after them changes.

import { h, select } from "./dom.js"
import { place } from "./place.js"

/**
 * A multiplication of a node's value, as requests for features have it.
 * @typedef {object} Edit
 * @property {string} node
 * @property {number[]} [channels] in a row; all without it
 * @property {[number, number, number, number]} [box] x1, y1, x2, y2 in positions of the map; all without it
 * @property {number} scale
 *
 * @typedef {{text: string, edit: Omit<Edit, "scale">}} Knob what can be turned
 */

/** As many as one request may have. */
const MOST = 16
/** @type {Array<[string, string]>} */
const SCALES = [["0", "Switch off"], ["0.5", "Halve"], ["2", "Double"], ["4", "× 4"], ["-1", "Turn its sign"]]
/** The last chosen, for the next knob. */
let scale = "0"

/** The edits of a place. @param {import("./place.js").Place} place @returns {Edit[]} */
export function editsOf({ e }) {
  try {
    const found = JSON.parse(e ?? "[]")
    return Array.isArray(found) ? found.filter(isEdit).slice(0, MOST) : []
  } catch {
    return []
  }
}

/** Whether it is an edit that can be shown here: one with other keys would be another one without them. @param {any} one @returns {one is Edit} */
function isEdit(one) {
  const { node, channels = [0], box = [0, 0, 1, 1], scale, ...others } = one ?? {}
  return typeof node === "string" && Number.isFinite(scale) && !Object.keys(others).length
    && Array.isArray(channels) && channels.length > 0 && channels.every((channel, i) => Number.isInteger(channel) && channel === channels[0] + i)
    && Array.isArray(box) && box.length === 4 && box.every(Number.isInteger)
}

/** Those that change the output of a node. @param {Edit[]} edits @param {import("./model.js").Model} model @param {string} name */
export function reaching(edits, model, name) {
  const before = model.before(model.resolve(name)?.name ?? name)
  return edits.filter(({ node }) => before.has(model.resolve(node)?.name ?? node))
}

/**
 * What can be turned where, and what has been turned.
 * @param {Edit[]} edits @param {Knob[]} knobs the first is the likeliest
 * @param {(changes: Record<string, string | null>) => void} go
 */
export function knobsView(edits, knobs, go) {
  if (!edits.length && !knobs.length) return ""
  /** Replace those alike: of the place as it is then, which may have moved on while this is still shown. @param {(other: Edit) => boolean} alike @param {...Edit} added */
  const change = (alike, ...added) => {
    const changed = [...editsOf(place()).filter((other) => !alike(other)), ...added]
    if (changed.length <= MOST) go({ e: changed.length ? JSON.stringify(changed) : null })
  }
  const what = select("What to turn", knobs.map(({ text }, i) => [String(i), text]), "0", () => {})
  const how = select("How to turn it", SCALES, scale, (value) => { scale = value })
  const add = h("button", { type: "button", disabled: edits.length >= MOST, onclick: () => {
    const { edit } = knobs[Number(what.value)]
    change((other) => where(other) === where(edit), { ...edit, scale: Number(how.value) })
  } }, "Apply")
  return h("section", { class: "knobs", "aria-label": "Turn knobs" },
    h("h3", {}, "What if?"),
    knobs.length ? h("div", { class: "row" }, what, how, add) : null,
    h("ul", { class: "plain-list row" }, ...edits.map((edit) => h("li", { class: "pill" }, described(edit),
      h("button", { type: "button", class: "quiet", "aria-label": `Take back: ${described(edit)}`, onclick: () => change((other) => other.scale === edit.scale && where(other) === where(edit)) }, "×")))),
    h("p", { class: "dim" }, edits.length ? "The outputs of these nodes and of those after them are shown beside the unchanged ones." : "Every node after this one then shows what it would be."))
}

/** What an edit selects. @param {Omit<Edit, "scale">} edit */
const where = ({ node, channels, box }) => JSON.stringify([node, channels, box])

/** @param {Edit} edit */
function described({ node, channels, box, scale }) {
  const part = channels ? `${node} ${channels.length > 1 ? `channels ${channels[0]} to ${channels[channels.length - 1]}` : `channel ${channels[0]}`}` : box ? `${node} at ${box[1]}, ${box[0]}` : node
  return `${part} × ${scale}`
}

/** A photo with edits, as the body of a request. @param {import("./photo.js").Photo} photo @param {Edit[]} edits */
export async function editedBody({ data }, edits) {
  const reader = new FileReader()
  const read = new Promise((resolve, reject) => {
    reader.onload = () => resolve(String(reader.result))
    reader.onerror = () => reject(reader.error)
  })
  reader.readAsDataURL(data)
  const url = await read
  return JSON.stringify({ images: [url.slice(url.indexOf(",") + 1)], edits })
}

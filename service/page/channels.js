// The grid of channels, a tile each.

import { image, range } from "./colours.js"
import { h, select } from "./dom.js"
import { short } from "./numbers.js"
import { reduce } from "./reductions.js"
import { legend, picture } from "./stage.js"
import { statisticsView } from "./statistics.js"

/** @typedef {import("./answers.js").Answer} Answer */

/** How many tiles are added at a time. */
const PAGE = 48
/** How many tiles of an answer are shown. @type {WeakMap<Answer, number>} */
const shownTiles = new WeakMap()

/**
 * The grid, with the choice of its order above it and the chosen channel's statistics below.
 * @param {Answer} answer with maps
 * @param {string | undefined} by what they are in order of: variation, strength or number
 * @param {number} chosen
 * @param {boolean} same whether all tiles have one scale
 * @param {(changes: Record<string, string | number | null>) => void} go
 */
export async function channelsView(answer, by, chosen, same, go) {
  const scales = select("Scale of the tiles", [["", "Own scales"], ["same", "One scale"]], same ? "same" : "", (r) => go({ r: r || null }))
  const order = select("Order", [["", "Most varied first"], ["strength", "Strongest first"], ["number", "By number"]], by ?? "", (s) => go({ s: s || null }))
  const count = answer.maps?.channels ?? 0
  const dead = (answer.variation ?? []).filter((/** @type {number} */ one) => one === 0).length
  const jump = h("input", { type: "number", min: 0, max: count - 1, value: chosen, "aria-label": "Channel", onchange: () => go({ ch: channelAt(answer, { ch: jump.value }) }) })
  return [
    h("div", { class: "row between" }, h("h3", {}, `${count} channels`), h("span", { class: "dim count" }, dead ? `${dead} constant` : ""), h("label", { class: "row dim count" }, "Channel", jump)),
    h("div", { class: "row" }, order, scales),
    ...(same ? [legend(whole(answer))] : []),
    await channelGrid(answer, by, same, chosen, (ch) => go({ ch })),
    statisticsView(await reduce("channelStatistics", { slot: answer.slot, channel: chosen }), `Channel ${chosen}`),
  ]
}

/** From the least to the greatest of all values. @param {Answer} answer */
const whole = ({ statistics: { min, max } }) => ({ low: min, high: max })

/** The channels in order. @param {Answer} answer @param {string | undefined} by */
export function ordered({ maps, strength = new Float32Array(), variation = new Float32Array() }, by) {
  const numbers = [...Array(maps?.channels ?? 0).keys()]
  if (by === "number") return numbers
  const facts = by === "strength" ? strength : variation
  return numbers.sort((a, b) => facts[b] - facts[a])
}

/** The channel that the URL names, else the first in order. @param {Answer} answer @param {import("./place.js").Place} place */
export function channelAt(answer, { ch, s }) {
  const channel = Math.floor(Number(ch ?? ordered(answer, s)[0])) || 0
  return Math.max(0, Math.min(channel, (answer.maps?.channels ?? 1) - 1))
}

/** @param {Answer} answer @param {string | undefined} by @param {boolean} same @param {number} chosen @param {(channel: number) => void} choose */
async function channelGrid(answer, by, same, chosen, choose) {
  const common = same ? whole(answer) : null
  const { strength = new Float32Array(), variation = new Float32Array(), maps } = answer
  const sorted = ordered(answer, by)
  const grid = h("div", { class: "grid", role: "group", "aria-label": "Channels" })
  const more = h("button", { type: "button", class: "quiet", onclick: () => add(shown + PAGE) })
  let shown = 0
  await add(shownTiles.get(answer) ?? PAGE)
  return h("div", {}, grid, more)

  /** @param {number} most */
  async function add(most) {
    shownTiles.set(answer, most)
    const channels = sorted.slice(shown, most)
    shown += channels.length
    /** @type {Float32Array[]} */
    const values = await reduce("channels", { slot: answer.slot, channels })
    grid.append(...channels.map((channel, i) => tile(channel, values[i])))
    more.textContent = `Show ${Math.min(PAGE, sorted.length - shown)} more of ${sorted.length}`
    more.hidden = shown >= sorted.length
  }

  /** @param {number} channel @param {Float32Array} values */
  function tile(channel, values) {
    return h("button", {
      type: "button", class: "tile", "data-channel": channel, "aria-pressed": String(channel === chosen),
      "aria-label": `Channel ${channel}, ${variation[channel] ? `mean magnitude ${short(strength[channel])}` : "constant"}`,
      onclick: () => choose(channel),
    }, picture(image(values, maps?.width ?? 1, common ?? range(values))), h("span", {}, String(channel)))
  }
}

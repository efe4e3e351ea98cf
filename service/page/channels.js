// The grid of channels, a tile each.

import { image, range } from "./colours.js"
import { h, select } from "./dom.js"
import { short } from "./numbers.js"
import { reduce } from "./reductions.js"
import { picture } from "./stage.js"
import { statisticsView } from "./statistics.js"

/** @typedef {import("./answers.js").Answer} Answer */

/** How many tiles are added at a time. */
const PAGE = 48
/** How many tiles of an answer are shown. @type {WeakMap<Answer, number>} */
const shownTiles = new WeakMap()

/**
 * The grid, with the choice of its order above it and the chosen channel's statistics below.
 * @param {Answer} answer with maps
 * @param {boolean} byStrength otherwise by number
 * @param {number} chosen
 * @param {(changes: Record<string, string | number>) => void} go
 */
export async function channelsView(answer, byStrength, chosen, go) {
  const order = select("Order", [["strength", "Strongest first"], ["number", "By number"]], byStrength ? "strength" : "number", (s) => go({ s }))
  return [
    h("div", { class: "row between" }, h("h3", {}, `${answer.maps?.channels} channels`), order),
    await channelGrid(answer, byStrength, chosen, (ch) => go({ ch })),
    statisticsView(await reduce("channelStatistics", { slot: answer.slot, channel: chosen }), `Channel ${chosen}`),
  ]
}

/** @param {Answer} answer @param {boolean} byStrength @param {number} chosen @param {(channel: number) => void} choose */
async function channelGrid(answer, byStrength, chosen, choose) {
  const { order = [], strength = new Float32Array(), maps } = answer
  const sorted = byStrength ? order : [...order].sort((a, b) => a - b)
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
    const { low, high } = range(values)
    return h("button", {
      type: "button", class: "tile", "data-channel": channel, "aria-pressed": String(channel === chosen),
      "aria-label": `Channel ${channel}, mean magnitude ${short(strength[channel])}`,
      onclick: () => choose(channel),
    }, picture(image(values, maps?.width ?? 1, low, high)), h("span", {}, String(channel)))
  }
}

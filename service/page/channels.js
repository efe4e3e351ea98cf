// The grid of channels, a tile each.

import { image, range } from "./colours.js"
import { h, select } from "./dom.js"
import { legend } from "./legend.js"
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
 * @param {boolean} same whether all tiles have one scale
 * @param {(changes: Record<string, string | number | null>) => void} go
 */
export async function channelsView(answer, byStrength, chosen, same, go) {
  const scales = select("Scale of the tiles", [["", "Own scales"], ["same", "One scale"]], same ? "same" : "", (r) => go({ r: r || null }))
  const order = select("Order", [["strength", "Strongest first"], ["number", "By number"]], byStrength ? "strength" : "number", (s) => go({ s }))
  return [
    h("div", { class: "row between" }, h("h3", {}, `${answer.maps?.channels} channels`), scales, order),
    ...(same ? [legend(whole(answer))] : []),
    await channelGrid(answer, byStrength, same, chosen, (ch) => go({ ch })),
    statisticsView(await reduce("channelStatistics", { slot: answer.slot, channel: chosen }), `Channel ${chosen}`),
  ]
}

/** From the least to the greatest of all values. @param {Answer} answer */
const whole = ({ statistics: { min, max } }) => ({ low: min, high: max })

/** @param {Answer} answer @param {boolean} byStrength @param {boolean} same @param {number} chosen @param {(channel: number) => void} choose */
async function channelGrid(answer, byStrength, same, chosen, choose) {
  const common = same ? whole(answer) : null
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
    return h("button", {
      type: "button", class: "tile", "data-channel": channel, "aria-pressed": String(channel === chosen),
      "aria-label": `Channel ${channel}, mean magnitude ${short(strength[channel])}`,
      onclick: () => choose(channel),
    }, picture(image(values, maps?.width ?? 1, common ?? range(values))), h("span", {}, String(channel)))
  }
}

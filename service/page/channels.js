// The grid of channels, a picture each.

import { image, range } from "./colours.js"
import { h } from "./dom.js"
import { short } from "./numbers.js"
import { reduce } from "./reductions.js"
import { picture } from "./stage.js"

/** @typedef {import("./answers.js").Answer} Answer */

/** How many are drawn at a time. */
const PAGE = 48

/**
 * @param {Answer} answer with maps
 * @param {boolean} byStrength otherwise by number
 * @param {number} chosen
 * @param {(channel: number) => void} choose
 */
export async function channelGrid(answer, byStrength, chosen, choose) {
  const { order = [], strength = new Float32Array(), maps } = answer
  const sorted = byStrength ? order : [...order].sort((a, b) => a - b)
  const grid = h("div", { class: "grid", role: "group", "aria-label": "Channels" })
  const more = h("button", { type: "button", class: "quiet", onclick: () => add() })
  let shown = 0
  await add()
  return h("div", {}, grid, more)

  async function add() {
    const channels = sorted.slice(shown, shown + PAGE)
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

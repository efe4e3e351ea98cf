// Progress while one waits, and what went wrong.

import { Problem } from "./api.js"
import { h } from "./dom.js"

/** When the reason for waiting is shown, in milliseconds. */
const LONG = 4000

/**
 * What is waited for and how long it has taken, with a button to cancel.
 * @param {string} what
 * @param {() => void} stop
 * @param {string} why the reason shown where that takes long
 */
export function progress(what, stop, why) {
  const started = performance.now()
  const seconds = h("span", { class: "dim" })
  const line = h("div", { class: "progress" },
    h("p", { role: "status" }, `${what}…`), h("div", { class: "moving" }),
    h("div", { class: "row between" }, seconds, h("button", { type: "button", onclick: stop }, "Cancel")))
  const timer = setInterval(() => {
    const passed = performance.now() - started
    if (!line.isConnected && passed > 1000) return clearInterval(timer)
    const reason = passed > LONG ? `: ${why}` : ""
    seconds.textContent = `${(passed / 1000).toFixed(0)} s${reason}`
  }, 500)
  return line
}

/**
 * @param {unknown} error
 * @param {() => void} again
 * @param {() => void} [untrained] try again with random weights
 */
export function failure(error, again, untrained) {
  const title = error instanceof Problem ? error.title : "Something went wrong"
  const detail = error instanceof Error ? error.message : String(error)
  const missing = error instanceof Problem && error.type.endsWith("/weights-unavailable")
  return h("div", { class: "failure", role: "alert" }, h("h3", {}, title), h("p", {}, detail),
    h("div", { class: "row" },
      h("button", { type: "button", onclick: again }, "Try again"),
      missing && untrained ? h("button", { type: "button", class: "primary", onclick: untrained }, "Use random weights") : null))
}

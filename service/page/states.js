// Progress while one waits, and what went wrong.

import { Problem } from "./api.js"
import { h } from "./dom.js"
import { changeKey, storedKey } from "./key.js"

/** When the reason for waiting is shown, in milliseconds. */
const LONG = 4000
/** How often a server that is away is asked again, in milliseconds. */
const AGAIN = 3000

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

/** @typedef {[text: string, act: () => void]} Action */

/**
 * What went wrong, and what can be done about it.
 * @param {unknown} error @param {...Action} actions the first one tries again, the last one is the likeliest to help
 */
export function failure(error, ...actions) {
  const title = error instanceof Problem ? error.title : "Something went wrong"
  const alert = h("div", { class: "failure", role: "alert" }, h("h2", { tabindex: -1 }, title), h("p", {}, reason(error)),
    h("div", { class: "row" }, ...actions.map(([text, act], i) =>
      h("button", { type: "button", class: i && i === actions.length - 1 ? "primary" : "", onclick: act }, text))))
  if (actions.length) onceBack(error, alert, actions[0][1])
  return alert
}

/**
 * Try again once a server that was away answers, as long as the notice of it is shown.
 * @param {unknown} error @param {HTMLElement} notice @param {() => void} again
 */
export function onceBack(error, notice, again) {
  if (!(error instanceof Problem) || error.status) return
  const text = notice.firstChild // of this failure: the notice over the graph is used for others as well
  let away = false
  const look = async () => {
    const there = await fetch("healthz").catch(() => null)
    if (!text?.isConnected || notice.hidden) return
    if (!there) {
      away = true
      setTimeout(look, AGAIN)
    } else if (away) again() // otherwise the request itself fails, and would again
  }
  setTimeout(look) // once the notice is on the page
}

/** @param {unknown} error */
export const reason = (error) => (error instanceof Error ? error.message : String(error))

/** To try again; where weights are missing, with random ones; with another key where this one does not allow it. @param {unknown} error @param {() => void} again @param {() => void} untrained @returns {Action[]} */
export function retries(error, again, untrained) {
  if (error instanceof Problem && error.status === 403 && storedKey()) return [["Use another key", changeKey]]
  const missing = error instanceof Problem && error.type.endsWith("/weights-unavailable")
  return [["Try again", again], ...(missing ? [/** @type {Action} */ (["Use random weights", untrained])] : [])]
}

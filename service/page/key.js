// The API key of this tab: asked for when the service requires one, kept until the tab is closed.

import { byId } from "./dom.js"

const NAME = "fxserve-key"

/** @type {Promise<void> | null} */
let asking = null
/** Whether a request waits for the key that is asked for. */
let needed = false

/** The key where the browser keeps nothing. @type {string | null} */
let unkept = null

/** @returns {string | null} */
export function storedKey() {
  try { return unkept ?? sessionStorage.getItem(NAME) } catch { return unkept }
}

/** @param {string} key */
function keep(key) {
  try { sessionStorage.setItem(NAME, key) } catch { unkept = key }
}

/** Show the button that changes the key. */
export function showKeyButton() {
  const button = byId("key-button")
  button.hidden = false
  button.onclick = changeKey
}

/** Ask for another key than the one that is kept. */
export function changeKey() {
  askForKey("", false).then(() => location.reload())
}

/**
 * Ask for a key, once for however many requests wait for it.
 * @param {string} reason why the last one was refused
 * @param {boolean} [waits] whether a request waits for it; else the dialog can be left without one
 */
export function askForKey(reason, waits = true) {
  needed ||= waits
  asking ??= new Promise((resolve) => {
    const dialog = /** @type {HTMLDialogElement} */ (byId("key-dialog"))
    const form = /** @type {HTMLFormElement} */ (byId("key-form"))
    const input = /** @type {HTMLInputElement} */ (form.elements.namedItem("key"))
    byId("key-reason").textContent = reason
    input.value = ""
    // Browsers close a dialog at the second Escape, whatever is prevented at the first.
    dialog.onclose = () => {
      if (dialog.open) return
      if (asking && needed) dialog.showModal()
      else asking = null
    }
    form.onsubmit = () => {
      keep(input.value.trim())
      asking = null
      needed = false
      showKeyButton()
      resolve()
    }
    dialog.showModal()
  })
  return asking
}

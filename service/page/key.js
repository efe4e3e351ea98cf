// The API key of this tab: asked for when the service requires one, kept until the tab is closed.

import { byId } from "./dom.js"

const NAME = "fxserve-key"

/** @type {Promise<void> | null} */
let asking = null

/** @returns {string | null} */
export function storedKey() {
  return sessionStorage.getItem(NAME)
}

/** Show the button that changes the key. */
export function showKeyButton() {
  const button = byId("key-button")
  button.hidden = false
  button.onclick = () => askForKey("").then(() => location.reload())
}

/**
 * Ask for a key, once for however many requests wait for it.
 * @param {string} reason why the last one was refused
 */
export function askForKey(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = /** @type {HTMLDialogElement} */ (byId("key-dialog"))
    const form = /** @type {HTMLFormElement} */ (byId("key-form"))
    const input = /** @type {HTMLInputElement} */ (form.elements.namedItem("key"))
    byId("key-reason").textContent = reason
    input.value = ""
    dialog.oncancel = (event) => event.preventDefault() // nothing works without a key
    form.onsubmit = () => {
      sessionStorage.setItem(NAME, input.value.trim())
      asking = null
      showKeyButton()
      resolve()
    }
    dialog.showModal()
  })
  return asking
}

// Copying text, on any page.

import { h } from "./dom.js"

/** Put a text on the clipboard. @param {string} text */
export async function copyText(text) {
  // Browsers give the clipboard to pages of HTTPS and of this machine only; the older way works elsewhere.
  if (navigator.clipboard) return navigator.clipboard.writeText(text)
  const box = h("textarea", { class: "unseen", readonly: true })
  box.value = text
  document.body.append(box)
  box.select()
  document.execCommand("copy")
  box.remove()
}

// The sheet of keys, which the key ? opens, and the key that goes to the search.

import { byId, h } from "./dom.js"

/** @type {Array<[where: string, keys: Array<[keys: string[], what: string]>]>} */
const KEYS = [
  ["Everywhere", [[["?"], "This sheet"], [["/"], "Search models, or nodes of the model"], [["Esc"], "Give back the window that maps were enlarged to"]]],
  ["Tree", [[["↑", "↓"], "Next row"], [["→", "←"], "Open and close a module"], [["Enter"], "See the output"], [["Home", "End"], "First and last row"]]],
  ["Graph", [[["↑", "↓"], "Along the edges"], [["←", "→"], "In order of execution"], [["Enter", "Backspace"], "Expand and collapse a module"],
    [["+", "−", "0"], "Zoom, and fit the whole"], [["Double click"], "Expand or collapse"], [["Ctrl + wheel", "Pinch"], "Zoom"]]],
  ["Map", [[["↑", "↓", "←", "→"], "Another position, in similarity and attention"], [["Click"], "Fix the position under the pointer"]]],
  ["Line between the panes", [[["←", "→"], "Wider and narrower maps"]]],
]

/** Open the sheet by its button and by the key. */
export function watchKeys() {
  const sheet = /** @type {HTMLDialogElement} */ (byId("keys-dialog"))
  const close = h("button", { type: "button", class: "primary", onclick: () => sheet.close() }, "Close")
  const open = () => {
    sheet.replaceChildren(h("h2", { id: "keys-title" }, "Keys"), ...KEYS.flatMap(([where, keys]) => [h("h3", {}, where),
      h("dl", { class: "keys" }, ...keys.map(([names, what]) => h("div", {}, h("dt", {}, ...names.map((name) => h("kbd", {}, name))), h("dd", {}, what))))]), close)
    sheet.showModal()
    close.focus({ preventScroll: true })
  }
  byId("keys-button").addEventListener("click", open)
  addEventListener("keydown", (event) => {
    const writing = event.target instanceof HTMLElement && event.target.matches("input:not([type=range]), select, textarea")
    if (writing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return
    const search = /** @type {HTMLElement | null} */ (byId("models").querySelector("input[type=search]"))
    const action = event.key === "?" ? open : event.key === "/" && search ? () => search.focus() : null
    if (!action) return
    event.preventDefault()
    action()
  })
}

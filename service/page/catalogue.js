// The left pane while no model is chosen: the list of models, with a search.

import { askJson } from "./api.js"
import { h, select } from "./dom.js"
import { kept, link, place } from "./place.js"

/** @type {Record<string, string>} */
const TASKS = {
  classification: "Classification", quantization: "Classification, int8", segmentation: "Segmentation",
  detection: "Detection", video: "Video", optical_flow: "Optical flow",
}

/** @typedef {{name: string, task: string, loaded: boolean, trained?: boolean}} Entry */

/** @type {Map<string, Promise<any>>} */
const lists = new Map()

/** The models of a source; of all but timm where it is empty. @param {string} source */
export function listed(source) {
  if (!lists.has(source)) lists.set(source, askJson(`v1/models${source ? `?source=${source}` : ""}`))
  return /** @type {Promise<any>} */ (lists.get(source))
}

/** The search, kept while a model is shown. */
let text = "", task = "", source = ""

/** @param {HTMLElement} pane */
export async function showCatalogue(pane) {
  const search = h("input", { type: "search", value: text, placeholder: "Search models", "aria-label": "Search models",
    oninput: () => { text = search.value; show() } })
  const results = h("div", { class: "results" })
  const count = h("p", { class: "dim count", role: "status" })
  const tasks = h("div", { class: "row" })
  pane.replaceChildren(h("div", { class: "pane-head" }, search, tasks, count), results)
  const whole = await listed("")
  const options = /** @type {Array<[string, string]>} */ ([["", "All sources"], ["torchvision", "torchvision"], ["packaged", "With weights"], ["own", "Own"]])
  if (whole.timm) options.push(["timm", `timm (${whole.timm.models})`])
  tasks.append(
    select("Task", [["", "All tasks"], ...Object.entries(TASKS)], task, (value) => { task = value; show() }),
    select("Source", options, source, (value) => { source = value; show() }),
  )
  await show()

  async function show() {
    const words = text.trim().toLowerCase().split(/\s+/)
    // timm's models are many: they are listed once they are searched for.
    const wanted = [text, task, source].join("\n")
    const { models } = await listed(source)
    for (const { name } of (await listed("packaged")).models) for (const one of models) if (one.name === name) one.trained = true
    const further = !source && text.trim() && whole.timm
    if (further) list(models, ", searching timm…")
    const others = further ? (await listed("timm")).models : []
    if (wanted !== [text, task, source].join("\n")) return // more was typed meanwhile
    list([...models, ...others], !source && !further && whole.timm ? `, and ${whole.timm.models} of timm: search for them` : "")

    /** @param {Entry[]} entries @param {string} more */
    function list(entries, more) {
      const found = entries.filter((one) => (!task || one.task === task) && words.every((word) => one.name.toLowerCase().includes(word)))
      count.textContent = `${found.length} ${found.length === 1 ? "model" : "models"}${more}`
      results.replaceChildren(...Object.entries(TASKS).flatMap(([key, title]) => {
        const inTask = found.filter((one) => one.task === key)
        return inTask.length ? [h("h2", {}, title), h("ul", { class: "plain-list" }, ...inTask.map(entry))] : []
      }))
    }
  }
}

/** @param {Entry} one */
function entry({ name, loaded, trained }) {
  const notes = [trained ? "trained" : "", loaded ? "in memory" : ""].filter(Boolean).join(", ")
  const mark = notes ? h("span", { class: "dim" }, ` ${notes}`) : null
  return h("li", {}, h("a", { href: link({ m: name, ...kept(place()) }) }, name, mark))
}

// The left pane while no model is chosen: the list of models, with a search.

import { askJson } from "./api.js"
import { h, select } from "./dom.js"
import { kept, link, place } from "./place.js"

/** @type {Record<string, string>} */
const TASKS = {
  classification: "Classification", quantization: "Classification, int8", segmentation: "Segmentation",
  detection: "Detection", video: "Video", optical_flow: "Optical flow",
}

/** @typedef {{name: string, task: string, loaded: boolean}} Entry */

/** @type {Map<string, Promise<any>>} */
const lists = new Map()

/** @param {string} source */
function listed(source) {
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
    const { models } = /** @type {{models: Entry[]}} */ (await listed(source))
    const wanted = text.trim().toLowerCase()
    const found = models.filter((one) => (!task || one.task === task) && one.name.toLowerCase().includes(wanted))
    count.textContent = `${found.length} ${found.length === 1 ? "model" : "models"}`
    results.replaceChildren(
      ...Object.entries(TASKS).flatMap(([key, title]) => {
        const entries = found.filter((one) => one.task === key)
        return entries.length ? [h("h2", {}, title), h("ul", { class: "plain-list" }, ...entries.map(entry))] : []
      }),
    )
  }
}

/** @param {Entry} one */
function entry({ name, loaded }) {
  const mark = loaded ? h("span", { class: "dim" }, " in memory") : null
  return h("li", {}, h("a", { href: link({ m: name, ...kept(place()) }) }, name, mark))
}

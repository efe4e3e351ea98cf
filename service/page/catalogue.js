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

/** The models of a source; of all but timm, which is counted, where it is empty. @param {string} source */
export function listed(source) {
  if (!lists.has(source)) {
    const list = askJson(`v1/models${source ? `?source=${source}` : ""}`)
    list.catch(() => lists.delete(source)) // so that it can be tried again
    lists.set(source, list)
  }
  return /** @type {Promise<any>} */ (lists.get(source))
}

/** Have the models be listed anew: the server has others than before. */
export const relist = () => lists.clear()

/** The models of all sources but timm, by name. The server imports timm to count its models, which takes a second. @returns {Promise<Entry[]>} */
export async function withoutTimm() {
  const sources = await Promise.all(["torchvision", "packaged", "own"].map(listed))
  sources[1].models.forEach((/** @type {Entry} */ one) => { one.trained = true })
  return sources.flatMap(({ models }) => models).sort((one, other) => (one.name < other.name ? -1 : 1))
}

/** The search, kept while a model is shown. */
let text = "", task = "", source = ""

/** @param {HTMLElement} pane @param {Promise<void>} before what is more urgent than to count timm's models */
export async function showCatalogue(pane, before) {
  const search = h("input", { type: "search", value: text, placeholder: "Search models", "aria-label": "Search models",
    oninput: () => { text = search.value; show() } })
  const results = h("div", { class: "results" })
  const count = h("p", { class: "dim count", role: "status" })
  const tasks = h("div", { class: "row" })
  pane.replaceChildren(h("div", { class: "pane-head" }, search, tasks, count), results)
  const options = /** @type {Array<[string, string]>} */ ([["", "All sources"], ["torchvision", "torchvision"], ["packaged", "With weights"], ["own", "Own"]])
  const sources = select("Source", options, source, (value) => { source = value; show() })
  const offer = h("option", { value: "timm", selected: source === "timm" }, "timm")
  if (source === "timm") sources.append(offer)
  const kinds = select("Task", [["", "All tasks"], ...Object.entries(TASKS)], task, (value) => { task = value; show() })
  tasks.append(kinds, sources)
  /** How many models timm has, once they are counted. @type {number | null} */ let timm = null
  await show()
  await before
  if (!results.isConnected) return // a model was chosen meanwhile
  await counted()
  await show()

  /** Where timm's models cannot be counted, the list stays as it is. */
  async function counted() {
    timm ??= await listed("").then((all) => all.timm?.models ?? 0, () => null)
    if (!timm) return
    offer.textContent = `timm (${timm})`
    if (!offer.isConnected) sources.append(offer)
  }

  async function show() {
    const words = text.trim().toLowerCase().split(/\s+/)
    // timm's models are many: they are listed once they are searched for.
    const wanted = [text, task, source].join("\n")
    const stale = () => wanted !== [text, task, source].join("\n") // more was typed meanwhile
    const models = source ? (await listed(source)).models : await withoutTimm()
    if (stale()) return
    const searched = !source && text.trim()
    if (searched && timm === null) {
      list(models, ", counting timm's models…")
      await counted()
      if (stale()) return
    }
    if (searched && timm) list(models, ", searching timm…")
    const others = searched && timm ? (await listed("timm")).models : []
    if (stale()) return
    list([...models, ...others], !source && !searched && timm ? `, and ${timm} of timm: search for them` : "")

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

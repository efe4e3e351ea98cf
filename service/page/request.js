// The request behind what is shown: copied as code, downloaded, or made an extractor.

import { askFeatures } from "./answers.js"
import { copyText } from "./clipboard.js"
import { h } from "./dom.js"
import { makeExtractor } from "./extractors.js"
import { curl, pythonCode, requestOf } from "./snippets.js"

/** @typedef {import("./answers.js").Answer} Answer */
/** @typedef {import("./model.js").Model} Model */
/** @typedef {{node: string, transforms: string[], id: string | null}} Wanted a node, and the extractor that its transforms need */

/** The language of the code; kept while other nodes are chosen. */
let language = "curl"

/**
 * @param {Model} model
 * @param {Wanted} wanted
 * @param {{name: string, type: string}} file that is sent
 * @param {Answer | null} answer null where there is none yet
 */
export function requestView(model, { node, transforms, id }, file, answer) {
  const request = requestOf(model, [node], file, { transforms, id })
  const code = h("code", {})
  const copied = h("span", { class: "dim", role: "status" })
  const made = h("p", { class: "dim", role: "status" })
  const choices = h("div", { class: "segments", role: "group", "aria-label": "Language" },
    ...[["curl", "curl"], ["python", "Python"]].map(([id, text]) =>
      h("button", { type: "button", id: `as-${id}`, onclick: () => { language = id; show() } }, text)))
  const copy = h("button", { type: "button", onclick: async () => {
    await copyText(code.textContent ?? "")
    copied.textContent = "Copied "
    setTimeout(() => (copied.textContent = ""), 2000)
  } }, "Copy")
  show()
  return h("section", { class: "request", "aria-label": "The request" },
    h("h3", {}, "The same request from a program"),
    h("div", { class: "row between" }, choices, h("span", {}, copied, copy)),
    h("pre", { tabindex: 0, "aria-label": "The request" }, code),
    h("div", { class: "row" },
      answer ? h("button", { type: "button", onclick: () => download(answer, "safetensors") }, "Download safetensors") : null,
      answer ? h("button", { type: "button", onclick: () => download(answer, "npy") }, "Download npy") : null,
      h("button", { type: "button", onclick: make }, "Make an extractor")), made)

  function show() {
    code.textContent = language === "curl" ? curl(request) : pythonCode(request)
    for (const button of choices.children) button.setAttribute("aria-pressed", String(button.id === `as-${language}`))
  }

  /** @param {Answer} answer @param {string} suffix */
  async function download(answer, suffix) {
    try {
      const data = suffix === "safetensors" ? answer.file : await (await askFeatures(request, answer.photo, "application/x-npy")).blob()
      const link = h("a", { href: URL.createObjectURL(data), download: `${model.name}-${node}.${suffix}` })
      link.click()
      URL.revokeObjectURL(link.href)
    } catch (error) {
      made.textContent = error instanceof Error ? error.message : String(error)
    }
  }

  async function make() {
    made.textContent = "Building…"
    try {
      const found = await makeExtractor(model, node, transforms)
      made.replaceChildren(`Extractor ${found.id} is ${found.state}. POST photos to `, h("code", {}, `/v1/extractors/${found.id}/features`))
    } catch (error) {
      made.textContent = error instanceof Error ? error.message : String(error)
    }
  }
}

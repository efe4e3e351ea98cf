// The request behind what is shown: copied as code, downloaded, or made an extractor.

import { askFeatures } from "./answers.js"
import { h, select } from "./dom.js"
import { makeExtractor } from "./extractors.js"
import { megabytes, shapeText } from "./numbers.js"
import { reason } from "./states.js"
import { curl, pythonCode, requestOf } from "./snippets.js"

/** @typedef {import("./answers.js").Answer} Answer */
/** @typedef {import("./model.js").Model} Model */
/** @typedef {{node: string, transforms: string[], id: string | null, query?: Record<string, string>, evidence?: import("./snippets.js").Request["evidence"], what?: string}} Wanted
 *   a node; with transforms the extractor that they need and what is asked of it; the class whose evidence is asked for; and which of several outputs it is */

/** The language of the code; kept while other nodes are chosen. */
let language = "curl"
/** What is asked of the features, where the model and the nodes have it; kept as well. @type {Record<string, string>} */
let query = {}
/** Nodes that stay in the request while others are chosen. @type {WeakMap<Model, string[]>} */
const collected = new WeakMap()

/** The choices, of which the first is what comes without asking. @type {Array<[name: string, text: string, choices: Array<[string, string]>]>} */
const CHOICES = [
  ["pool", "Pool", [["", "whole maps"], ["avg", "average"], ["max", "maximum"], ["gem", "GeM"], ["cls", "class token"]]],
  ["dtype", "Type", [["", "float32"], ["float16", "float16"], ["bfloat16", "bfloat16"]]],
  ["normalize", "Length", [["", "as it is"], ["l2", "one (L2)"]]],
  ["precision", "Arithmetic", [["", "float32"], ["bfloat16", "bfloat16"], ["float16", "float16"], ["int8", "int8"]]],
]

/**
 * @param {Model} model
 * @param {Wanted} wanted
 * @param {{name: string, type: string, url?: string | null}} file that is sent
 * @param {Answer | null} answer null where there is none yet
 * @param {import("./size.js").Query} size
 */
export function requestView(model, { node, transforms, id, query: fixed = {}, evidence = null, what = "" }, file, answer, size) {
  const plain = !transforms.length && !evidence
  const code = h("code", {})
  const weight = h("p", { class: "dim" })
  const nodes = h("div", { class: "chosen-nodes", role: "group", "aria-label": "Nodes of the request" })
  const copied = h("span", { class: "dim", role: "status" })
  const made = h("p", { class: "dim", role: "status" })
  const languages = h("div", { class: "segments", role: "group", "aria-label": "Language" },
    ...[["curl", "curl"], ["python", "Python"]].map(([id, text]) =>
      h("button", { type: "button", id: `as-${id}`, onclick: () => { language = id; show() } }, text)))
  const copy = h("button", { type: "button", onclick: async () => {
    await copyText(code.textContent ?? "")
    copied.textContent = "Copied "
    setTimeout(() => (copied.textContent = ""), 2000)
  } }, "Copy")
  const npy = h("button", { type: "button", onclick: () => download("npy") }, "Download npy")
  const choices = new Map(CHOICES.map(([name, text, list]) => [name, select(text, list, "", (value) => {
    query = { ...query, [name]: value }
    if (!value) delete query[name]
    show()
  })]))
  const options = !plain ? "" : h("details", { class: "options", open: Object.keys(asked()).length > 0 || others().length > 0 },
    h("summary", {}, "Change what is asked for"), nodes,
    h("div", { class: "choices" }, ...CHOICES.map(([name, text]) => h("label", { class: "stacked" }, text, choices.get(name) ?? ""))))
  show()
  return h("section", { class: "request", "aria-label": "The request" },
    h("h3", {}, "The same request from a program"),
    what ? h("p", { class: "dim" }, `For ${what}. What it is compared with comes from a request like it.`) : null, options, weight,
    h("div", { class: "row between" }, languages, h("span", {}, copied, copy)),
    h("pre", { tabindex: 0, "aria-label": "The request" }, code),
    h("div", { class: "row" },
      answer ? h("button", { type: "button", onclick: () => download("safetensors") }, "Download safetensors") : null,
      answer && !evidence ? npy : null,
      evidence ? null : h("button", { type: "button", onclick: make }, "Make an extractor")), made)

  /** The nodes that stay in the request. */
  function others() {
    return !plain ? [] : (collected.get(model) ?? []).filter((name) => name !== node)
  }

  /** Whether it is known to have none; tokens of videos have one, but no grid. @param {import("./model.js").NodeInfo | null | undefined} node */
  function lacksClassToken(node) {
    return node?.tokens ? !node.tokens.class_token : ![null, "tokens"].includes(node?.layout ?? null) || node?.shape?.length !== 3
  }

  /** Why a choice cannot be asked for; empty where it can. @param {string} name @param {string} value */
  function refusal(name, value) {
    const { backends, note } = (name === "precision" && model.precisions[value]) || { backends: [""], note: "" }
    if (!backends.length) return note ?? "not served here"
    const without = name === "pool" && value === "cls" ? [node, ...others()].filter((one) => lacksClassToken(model.resolve(one))) : []
    return without.length ? `${without.join(", ")}: no class token` : ""
  }

  /** What is asked for and can be. */
  function asked() {
    return Object.fromEntries(Object.entries(query).filter(([name, value]) => !refusal(name, value)))
  }

  function request() {
    return requestOf(model, [node, ...others()], file, { transforms, id, evidence, edits: answer?.edits ?? [], query: plain ? { ...asked(), ...size } : fixed })
  }

  function show() {
    code.textContent = language === "curl" ? curl(request()) : pythonCode(request())
    for (const button of languages.children) button.setAttribute("aria-pressed", String(button.id === `as-${language}`))
    const { dtype, precision } = plain ? asked() : {}
    npy.disabled = others().length > 0 || (dtype ?? precision) === "bfloat16" // which npy does not have
    for (const [name, choice] of choices) {
      for (const option of choice.options) {
        option.title = refusal(name, option.value)
        option.disabled = option.title !== ""
      }
      choice.value = asked()[name] ?? ""
    }
    weight.textContent = !plain ? "" : weightText(model, request())
    const kept = collected.get(model) ?? []
    /** @param {string} name @param {boolean} keep */
    const change = (name, keep) => {
      collected.set(model, keep ? [...kept, name] : kept.filter((other) => other !== name))
      show()
    }
    nodes.replaceChildren(h("span", { class: "dim" }, "Nodes"), ...[...new Set([node, ...kept, ...Object.keys(model.levels)])].map((name) =>
      h("button", { type: "button", class: "pill", "aria-pressed": String(name === node || kept.includes(name)),
        title: name === node ? "Keep this node in the request while you choose others" : "",
        onclick: () => change(name, !kept.includes(name)) }, name === node && kept.includes(name) ? `${name} ✓` : name)))
  }

  /** @param {string} suffix */
  async function download(suffix) {
    if (!answer) return
    try {
      const own = suffix === "safetensors" && !others().length && (!plain || !Object.keys(asked()).length)
      const data = own ? answer.file : await (await askFeatures(request(), answer.photo, `application/x-${suffix}`)).blob()
      const link = h("a", { href: URL.createObjectURL(data), download: `${model.name}-${others().length ? "features" : node}.${suffix}` })
      link.click()
      URL.revokeObjectURL(link.href)
    } catch (error) {
      made.textContent = reason(error)
    }
  }

  async function make() {
    made.textContent = "Building…"
    try {
      const found = await makeExtractor(model, request())
      made.replaceChildren(`Extractor ${found.id} is ${found.state}. POST photos to `, h("code", {}, `/v1/extractors/${found.id}/features`))
    } catch (error) {
      made.textContent = reason(error)
    }
  }
}

/** The shapes and the size of the answer for one photo or input. @param {Model} model @param {import("./snippets.js").Request} request */
function weightText(model, { nodes, query }) {
  if (query.image_size || query.fit) return ""
  let bytes = 0
  const shapes = nodes.map((name) => {
    const node = model.resolve(name)
    let shape = node?.shape?.map((size) => size ?? 1) ?? []
    const channels = node?.layout?.startsWith("NC") ? shape[1] : shape.at(-1)
    if (query.pool && shape.length > 2) shape = [1, channels ?? 1]
    bytes += shape.reduce((product, size) => product * size, bytesOfValue(node?.dtype ?? "float32", query))
    return `${name}: ${shapeText(shape)}`
  })
  return `For one ${model.takesPhotos ? "photo" : "input"}: ${shapes.join("; ")}; ${megabytes(bytes)}`
}

/** Only floating-point values are cast, and a lower precision is that of what would be float32. @param {string} dtype @param {Record<string, string>} query */
function bytesOfValue(dtype, { dtype: cast, precision = "" }) {
  if (dtype === "bool") return 1
  const half = (cast && dtype.includes("float")) || (precision.endsWith("float16") && dtype === "float32")
  return half ? 2 : Number(/\d+$/.exec(dtype)) / 8
}

/** Put a text on the clipboard. @param {string} text */
async function copyText(text) {
  // Browsers give the clipboard to pages of HTTPS and of this machine only; the older way works elsewhere.
  if (navigator.clipboard) return navigator.clipboard.writeText(text)
  const box = h("textarea", { class: "unseen", readonly: true })
  box.value = text
  document.body.append(box)
  box.select()
  document.execCommand("copy")
  box.remove()
}

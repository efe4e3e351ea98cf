// The right pane: what the chosen node makes of a photo.

import { askFeatures, attention, featureRequest, features, makeExtractor } from "./answers.js"
import { channelGrid, range } from "./channels.js"
import { copyText } from "./clipboard.js"
import { image, rgbImage } from "./colours.js"
import { h, select } from "./dom.js"
import { storedKey } from "./key.js"
import { flops, parameters, shapeText, short } from "./numbers.js"
import { isMissing, photoOf } from "./photo.js"
import { photoPicker } from "./picker.js"
import { reduce } from "./reductions.js"
import { curl, pythonCode } from "./snippets.js"
import { patchUnder, stage } from "./stage.js"
import { failure, progress } from "./states.js"
import { bars, statisticsView } from "./statistics.js"
import { kind } from "./tree.js"

/** @typedef {import("./answers.js").Answer} Answer */
/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./place.js").Place} Place */

/** Larger models are asked only once somebody says so: they take their time, and gigabytes. */
const LARGE = 150e6

const BUILDING = "weights are being loaded and the extractor is being built"

/** @type {Array<[string, string]>} */
const VIEWS = [["channels", "Channels"], ["mean", "Heat-map"], ["pca", "PCA"], ["similarity", "Similarity"], ["attention", "Attention"]]

export class Inspector {
  /** @type {Answer[]} */ #answers = []
  #asked = ""
  #drawn = ""
  #stop = new AbortController()
  /** @type {Set<string>} */ #agreed = new Set()
  #opacity = 0.7
  #language = "curl"
  /** @type {Place} */ #place = {}
  /** @type {Model | null} */ #model = null

  /** @param {HTMLElement} pane @param {(changes: Record<string, string | number | null>, replace?: boolean) => void} go @param {(file: File) => void} take */
  constructor(pane, go, take) {
    this.pane = pane
    this.go = go
    this.take = take
    this.head = h("div", { class: "pane-head" })
    this.picker = h("div", {})
    this.body = h("div", { class: "body" })
    this.foot = h("div", { class: "body" })
  }

  /** @param {Model} model @param {Place} place */
  async update(model, place) {
    this.#model = model
    this.#place = place
    const { n: name = "" } = place
    const node = model.resolve(name)
    this.pane.replaceChildren(this.head, this.picker, this.body, this.foot)
    this.#showHead(node, name)
    this.picker.replaceChildren(model.takesPhotos && node ? photoPicker(place, this.go, this.take) : "")
    if (!node) return this.#say(name ? `${model.name} has no node ${name}. Choose one in the tree or in the graph.` : "Choose a node.")
    if (!model.takesPhotos) {
      this.foot.replaceChildren(this.#request(name, "tensors.npy", "application/x-npy"))
      return this.#say(`${model.name} takes ${model.inputs.map((one) => `${one.name} ${one.layout}`).join(" and ")}, no photos: send it tensors.`)
    }
    if (!node.extractable) return this.#say(`The value of ${node.name} is no tensor of the images.`)
    const wanted = [model.name, model.weights, name, place.p ?? "", place.p2 ?? "", place.n2 ?? ""].join("\n")
    if (wanted === this.#asked) return this.#show()
    if (model.totals.params > LARGE && !this.#agreed.has(model.name)) return this.#askFirst(model, place)
    this.#asked = wanted
    await this.#ask(model, name, place)
  }

  /** Stop what is under way; another model comes. */
  stop() {
    this.#stop.abort()
    this.#asked = this.#drawn = ""
  }

  /** @param {Model} model @param {string} name @param {Place} place */
  async #ask(model, name, place) {
    this.#stop.abort()
    const stop = (this.#stop = new AbortController())
    this.#drawn = ""
    const waiting = progress(`Asking ${model.name} for ${name}`, () => {
      stop.abort()
      this.#asked = ""
      this.#say("Cancelled.", ["Ask again", () => this.update(model, this.#place)])
    }, BUILDING)
    this.body.classList.add("waiting")
    const late = setTimeout(() => this.body.replaceChildren(waiting), this.#answers.length ? 400 : 0)
    try {
      const first = await photoOf(place.p)
      const pairs = [{ photo: first, name, slot: "a" }]
      if (place.p2) pairs.push({ photo: await photoOf(place.p2), name, slot: "b" })
      if (place.n2) pairs.push({ photo: first, name: place.n2, slot: "b" })
      const answers = await Promise.all(pairs.map(({ photo, name, slot }) => features(model, name, photo, slot, stop.signal)))
      if (stop.signal.aborted) return
      this.#answers = answers
      clearTimeout(late)
      this.foot.replaceChildren(this.#request(name, first.name, first.type))
      await this.#show()
    } catch (error) {
      if (stop.signal.aborted) return
      this.#asked = ""
      this.#answers = []
      this.body.replaceChildren(failure(error, () => this.update(model, this.#place), () => this.go({ w: "random" })))
    } finally {
      clearTimeout(late)
      waiting.remove()
      if (this.#stop === stop) this.body.classList.remove("waiting")
    }
  }

  /** @param {import("./model.js").NodeInfo | null} node @param {string} name */
  #showHead(node, name) {
    const model = /** @type {Model} */ (this.#model)
    if (!node) return this.head.replaceChildren()
    const inside = model.nodes.filter((other) => other.name === node.name || other.name.startsWith(`${name}.`))
    const facts = [kind(node), shapeText(node.shape), node.layout, node.stride ? `stride ${node.stride}` : null, node.dtype]
    const cost = inside.length > 1 ? `${inside.length} nodes, ` : ""
    this.head.replaceChildren(
      h("div", { class: "title-row" }, h("h2", { class: "node" }, node.name), node.level ? h("span", { class: "pill" }, node.level) : null),
      h("p", { class: "dim" }, facts.filter(Boolean).join(" · ")),
      sum(inside, "flops") ? h("p", { class: "dim" }, `${cost}${flops(sum(inside, "flops"))}, ${parameters(sum(inside, "params"))}`) : "",
      model.weights === "random" ? h("p", { class: "badge" }, "Random weights: what is seen comes from the architecture alone") : "",
    )
  }

  async #show() {
    const [first] = this.#answers
    const model = this.#model
    if (!first || !model) return
    const place = this.#place
    const view = first.maps ? (VIEWS.some(([name]) => name === place.v) ? place.v : "channels") : "values"
    const drawn = [this.#asked, view, place.ch, place.s, place.at, place.head, this.#opacity].join("\n")
    if (drawn === this.#drawn) return
    this.#drawn = drawn
    if (!first.maps) {
      const values = await reduce("values", { slot: first.slot, most: 4096 })
      const shown = first.shape.length === 2 ? [h("h3", {}, "Strongest values"), bars(values)]
        : [h("p", { class: "note" }, `A value of shape ${first.shape.join(" × ")} is no map over the image.`)]
      return this.body.replaceChildren(...shown, statisticsView(first.statistics, "All values"))
    }
    const blocks = document.createDocumentFragment()
    blocks.append(this.#views(view))
    if (isMissing(place.p)) blocks.append(h("p", { class: "note" }, "The photo of this link was dropped into somebody else's tab; this is a sample."))
    const channel = Number(place.ch ?? first.order?.[0] ?? 0)
    if (view === "attention") blocks.append(await this.#attention(model, first))
    else blocks.append(await this.#stages(view, channel))
    if (view === "channels") {
      blocks.append(
        h("div", { class: "row between" }, h("h3", {}, `${first.maps.channels} channels`),
          select("Order", [["strength", "Strongest first"], ["number", "By number"]], place.s ?? "strength", (s) => this.go({ s }, true))),
        await channelGrid(first, place.s !== "number", channel, (ch) => this.go({ ch }, true)))
      const one = await reduce("channelStatistics", { slot: first.slot, channel })
      blocks.append(statisticsView(one, `Channel ${channel}`))
    }
    blocks.append(statisticsView(first.statistics, "All values"))
    if (drawn !== this.#drawn) return // something else was chosen meanwhile
    const top = this.pane.scrollTop
    this.body.replaceChildren(blocks)
    this.pane.scrollTop = top
  }

  /** @param {string} view */
  #views(view) {
    const attending = this.#model && attentionOf(this.#model, this.#answers[0].node)
    return h("div", { class: "segments", role: "group", "aria-label": "View" },
      ...VIEWS.filter(([name]) => name !== "attention" || attending).map(([name, text]) =>
        h("button", { type: "button", "aria-pressed": String(name === view), onclick: () => this.go({ v: name }, true) }, text)))
  }

  /** @param {string} view @param {number} channel */
  async #stages(view, channel) {
    const place = this.#place
    const panels = await Promise.all(this.#answers.map(async (answer) => {
      const { maps } = answer
      if (!maps) return h("p", { class: "note" }, "This node gives no map.")
      const patch = view === "similarity" ? patchOf(place.at, maps) : null
      const own = Math.min(channel, maps.channels - 1)
      const map = await mapOf(answer, view, own, patch)
      const label = view === "channels" ? `Channel ${own}` : VIEWS.find(([name]) => name === view)?.[1] ?? ""
      const canvas = stage(answer, this.#model?.preprocessing, map.image, this.#opacity, patch, `${label} of ${answer.node} over ${answer.photo.name}`)
      const readout = h("span", { class: "readout" })
      const panel = h("figure", {}, canvas, h("figcaption", {}, h("span", {}, this.#answers.length > 1 ? `${answer.photo.name}, ${answer.node}` : label), readout))
      canvas.addEventListener("pointermove", (event) => {
        const { row, column } = patchUnder(event, maps)
        readout.textContent = map.values ? `${row}, ${column}: ${short(map.values[row * maps.width + column])}` : `${row}, ${column}`
      })
      if (view === "similarity") pickPatch(canvas, maps, (row, column) => this.go({ at: `${row},${column}` }, true))
      return panel
    }))
    const slider = h("input", { type: "range", min: 0, max: 1, step: 0.05, value: this.#opacity, "aria-label": "Opacity of the map",
      onchange: () => { this.#opacity = Number(slider.value); this.#show() } })
    const hint = view === "similarity" ? h("p", { class: "dim" }, "Click a place: how like it is each other place, as a cosine?") : ""
    return h("div", {}, h("div", { class: "stages" }, ...panels), h("label", { class: "row dim" }, "Map over photo", slider), hint)
  }

  /** @param {Model} model @param {Answer} first */
  async #attention(model, first) {
    const name = attentionOf(model, first.node)
    if (!name || !first.maps) return h("p", { class: "note" }, "No attention here.")
    const waiting = progress(`Asking for ${name}`, () => this.#stop.abort(), BUILDING)
    this.body.replaceChildren(this.#views("attention"), waiting)
    try {
      const answer = await attention(model, name, first.photo, this.#stop.signal)
      waiting.remove()
      const [, heads, tokens] = answer.shape
      const side = Math.floor(Math.sqrt(tokens)), before = tokens - side * side
      const maps = { height: side, width: side, channels: heads }
      const patch = patchOf(this.#place.at, maps)
      const head = this.#place.head === undefined ? null : Number(this.#place.head)
      const draw = async (/** @type {number | null} */ which) => {
        const query = before + patch.row * side + patch.column
        const values = (await reduce("attention", { slot: "attention", head: which, query })).slice(before)
        const { low, high } = range(values)
        return image(values, side, low, high)
      }
      const label = head === null ? "Mean of all heads" : `Head ${head}`
      const canvas = stage({ ...answer, photo: first.photo }, model.preprocessing, await draw(head), this.#opacity, patch, `${label} of ${name} over ${first.photo.name}`)
      pickPatch(canvas, maps, (row, column) => this.go({ at: `${row},${column}` }, true))
      const choices = /** @type {Array<[string, string]>} */ ([["", "Mean of all heads"], ...[...Array(heads).keys()].map((i) => [String(i), `Head ${i}`])])
      return h("div", {}, h("div", { class: "stages" }, h("figure", {}, canvas, h("figcaption", {}, `${label} of ${name}`))),
        select("Head", choices, head === null ? "" : String(head), (value) => this.go({ head: value || null }, true)),
        h("p", { class: "dim" }, "Click a place: where does it look?"))
    } catch (error) {
      return failure(error, () => { this.#drawn = ""; this.#show() }, () => this.go({ w: "random" }))
    }
  }

  /** @param {string} name @param {string} file @param {string} type */
  #request(name, file, type) {
    const model = /** @type {Model} */ (this.#model)
    const request = { ...featureRequest(model, name), key: name, file, type, locked: storedKey() !== null }
    const code = h("code", {})
    const copied = h("span", { class: "dim", role: "status" })
    const made = h("p", { class: "dim", role: "status" })
    const show = () => {
      code.textContent = this.#language === "curl" ? curl(request) : pythonCode(request)
      for (const button of choices.children) button.setAttribute("aria-pressed", String(button.id === `as-${this.#language}`))
    }
    const choices = h("div", { class: "segments", role: "group", "aria-label": "Language" },
      ...[["curl", "curl"], ["python", "Python"]].map(([id, text]) =>
        h("button", { type: "button", id: `as-${id}`, onclick: () => { this.#language = id; show() } }, text)))
    const copy = h("button", { type: "button", onclick: async () => {
      await copyText(code.textContent ?? "")
      copied.textContent = "Copied"
      setTimeout(() => (copied.textContent = ""), 2000)
    } }, "Copy")
    const [first] = this.#answers
    const download = async (/** @type {string} */ suffix) => {
      const data = suffix === "safetensors" ? first.file : await (await askFeatures(model, name, first.photo, "application/x-npy")).blob()
      const link = h("a", { href: URL.createObjectURL(data), download: `${model.name}-${name}.${suffix}` })
      link.click()
      URL.revokeObjectURL(link.href)
    }
    const make = async () => {
      made.textContent = "Making it…"
      try {
        const found = await makeExtractor(model, name)
        made.replaceChildren(`Extractor ${found.id} is ${found.state}: POST photos to `, h("code", {}, `/v1/extractors/${found.id}/features`))
      } catch (error) {
        made.textContent = error instanceof Error ? error.message : String(error)
      }
    }
    show()
    return h("section", { class: "request", "aria-label": "The request" },
      h("h3", {}, "The same from a program"),
      h("div", { class: "row between" }, choices, h("span", {}, copied, copy)),
      h("pre", { tabindex: 0, "aria-label": "The request" }, code),
      h("div", { class: "row" },
        first ? h("button", { type: "button", onclick: () => download("safetensors") }, "Download safetensors") : null,
        first ? h("button", { type: "button", onclick: () => download("npy") }, "Download npy") : null,
        h("button", { type: "button", onclick: make }, "Make an extractor")), made)
  }

  /** @param {Model} model @param {Place} place */
  #askFirst(model, place) {
    this.#say(`${model.name} has ${parameters(model.totals.params)}: its answer may take a minute.`, ["Ask it", () => {
      this.#agreed.add(model.name)
      this.update(model, place)
    }])
  }

  /** @param {string} text @param {[string, () => void]} [action] */
  #say(text, action) {
    this.#drawn = ""
    this.body.replaceChildren(h("p", { class: "note", role: "status" }, text),
      action ? h("button", { type: "button", class: "primary", onclick: action[1] }, action[0]) : "")
  }
}

/** @param {import("./model.js").NodeInfo[]} nodes @param {"flops" | "params"} what */
function sum(nodes, what) {
  return nodes.reduce((total, node) => total + node[what], 0)
}

/**
 * The image of one view, and its values where a pixel has one.
 * @param {Answer} answer @param {string} view @param {number} channel @param {{row: number, column: number} | null} patch
 * @returns {Promise<{image: ImageData, values: Float32Array | null}>}
 */
async function mapOf({ slot, maps }, view, channel, patch) {
  const width = maps?.width ?? 1
  if (view === "pca") return { image: rgbImage(await reduce("pca", { slot }), width), values: null }
  const values = view === "mean" ? await reduce("magnitude", { slot })
    : view === "similarity" ? await reduce("similarity", { slot, ...patch })
    : (await reduce("channels", { slot, channels: [channel] }))[0]
  const { low, high } = range(values)
  return { image: image(values, width, low, high), values }
}

/** The patch of the place, else the middle. @param {string | undefined} at @param {{height: number, width: number}} maps */
function patchOf(at, { height, width }) {
  const [row, column] = (at ?? "").split(",").map(Number)
  const known = at !== undefined && row >= 0 && row < height && column >= 0 && column < width
  return known ? { row, column } : { row: Math.floor(height / 2), column: Math.floor(width / 2) }
}

/** Choose places of a map by clicks or by arrow keys. @param {HTMLCanvasElement} canvas @param {{height: number, width: number}} maps @param {(row: number, column: number) => void} pick */
function pickPatch(canvas, maps, pick) {
  canvas.classList.add("pickable")
  canvas.addEventListener("click", (event) => {
    const { row, column } = patchUnder(/** @type {PointerEvent} */ (event), maps)
    pick(row, column)
  })
}

/** The attention node of the block that a node lies in, by the name that the pass gives it. @param {Model} model @param {string} name */
function attentionOf(model, name) {
  const node = model.resolve(name)
  if (!node || node.layout !== "tokens") return null
  const block = node.name.match(/^(encoder\.layers\.encoder_layer_\d+)\./)
  const blocks = model.nodes.filter((other) => other.name.endsWith(".self_attention"))
  const found = block && blocks.find((other) => other.name.startsWith(`${block[1]}.`))
  const last = found ?? blocks[blocks.length - 1]
  return last ? `${last.name}.attention` : null
}

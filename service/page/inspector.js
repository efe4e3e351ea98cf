// The right pane: what the chosen node makes of a photo.

import { attentionNodes, features } from "./answers.js"
import { attentionNear, attentionView } from "./attention.js"
import { channelGrid } from "./channels.js"
import { h, select } from "./dom.js"
import { keepFocus } from "./focus.js"
import { heading } from "./heading.js"
import { parameters } from "./numbers.js"
import { panel } from "./panel.js"
import { patchOf } from "./patch.js"
import { isMissing, photoOf } from "./photo.js"
import { photoPicker } from "./picker.js"
import { reduce } from "./reductions.js"
import { requestView } from "./request.js"
import { failure, progress } from "./states.js"
import { bars, statisticsView } from "./statistics.js"
import { VIEWS, lookAt } from "./views.js"

/** @typedef {import("./answers.js").Answer} Answer */
/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./place.js").Place} Place */

/** Larger models are asked only once somebody says so: they take their time, and gigabytes. */
const LARGE = 150e6

const BUILDING = "weights are being loaded and the extractor is being built"

export class Inspector {
  /** @type {Answer[]} */ #answers = []
  #asked = ""
  #drawn = ""
  #stop = new AbortController()
  /** @type {Set<string>} */ #agreed = new Set()
  #opacity = 0.7
  #attends = false
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
    if (this.body.parentElement !== this.pane) this.pane.replaceChildren(this.head, this.picker, this.body, this.foot)
    this.head.replaceChildren(...(node ? heading(model, node, name) : []))
    keepFocus(this.picker, () => this.picker.replaceChildren(model.takesPhotos && node ? photoPicker(place, this.go, this.take) : ""))
    if (!node) return this.#say(name ? `${model.name} has no node ${name}. Choose one in the tree or in the graph.` : "Choose a node.")
    if (!model.takesPhotos) {
      this.foot.replaceChildren(requestView(model, name, "tensors.npy", "application/x-npy", null))
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
      const [attention, ...answers] = await Promise.all([attentionNodes(model),
        ...pairs.map(({ photo, name, slot }) => features(model, name, photo, slot, stop.signal))])
      if (stop.signal.aborted) return
      this.#attends = attention.names.length > 0
      this.#answers = answers
      clearTimeout(late)
      keepFocus(this.foot, () => this.foot.replaceChildren(requestView(model, name, first.name, first.type, answers[0])))
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

  async #show() {
    const [first] = this.#answers
    const model = this.#model
    if (!first || !model) return
    const place = this.#place
    const view = first.maps ? (VIEWS.some(([name]) => name === place.v) ? place.v : "channels") : "values"
    const drawn = [this.#asked, view, place.ch, place.s, place.at, place.head].join("\n")
    if (drawn === this.#drawn) return
    this.#drawn = drawn
    if (!first.maps) {
      const values = await reduce("values", { slot: first.slot, most: 4096 })
      const shown = first.shape.length === 2 ? [h("h3", {}, "Strongest values"), bars(values)]
        : [h("p", { class: "note" }, `A value of shape ${first.shape.join(" × ")} is no map over the image.`)]
      return keepFocus(this.body, () => this.body.replaceChildren(...shown, statisticsView(first.statistics, "All values")))
    }
    const blocks = document.createDocumentFragment()
    blocks.append(this.#views(view))
    if (isMissing(place.p)) blocks.append(h("p", { class: "note" }, "The photo of this link was dropped into somebody else's tab; this is a sample."))
    const channel = Number(place.ch ?? first.order?.[0] ?? 0)
    if (view === "attention") blocks.append(await this.#attention(model, first))
    else blocks.append(await this.#stages(model, view, channel))
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
    keepFocus(this.body, () => this.body.replaceChildren(blocks))
    this.pane.scrollTop = top
  }

  /** @param {string} view */
  #views(view) {
    return h("div", { class: "segments", role: "group", "aria-label": "View" },
      ...VIEWS.filter(([name]) => name !== "attention" || this.#attends).map(([name, text]) =>
        h("button", { type: "button", "aria-pressed": String(name === view), onclick: () => this.go({ v: name }, true) }, text)))
  }

  /** @param {Model} model @param {string} view @param {number} channel */
  async #stages(model, view, channel) {
    const place = this.#place
    const shown = await Promise.all(this.#answers.map((answer) => {
      const { maps, photo, node } = answer
      if (!maps) return { figure: h("p", { class: "note" }, "This node gives no map."), fade() {} }
      const own = Math.min(channel, maps.channels - 1)
      const label = view === "channels" ? `Channel ${own}` : VIEWS.find(([name]) => name === view)?.[1] ?? ""
      return panel({
        photo, preprocessing: model.preprocessing, opacity: this.#opacity, size: maps,
        label: `${label} of ${node} over ${photo.name}`, caption: this.#answers.length > 1 ? `${photo.name}, ${node}` : label,
        look: (patch) => lookAt(answer, view, own, patch),
        patch: view === "similarity" ? patchOf(place.at, maps) : null,
        choose: ({ row, column }) => this.go({ at: `${row},${column}` }, true),
      })
    }))
    const hint = view === "similarity"
      ? h("p", { class: "dim" }, "Point at a place: how like it is each other place, as a cosine? A click or the arrow keys keep it.") : ""
    return h("div", {}, h("div", { class: "stages" }, ...shown.map(({ figure }) => figure)), this.#slider(shown), hint)
  }

  /** @param {{fade: (share: number) => void}[]} shown */
  #slider(shown) {
    const slider = h("input", { type: "range", min: 0, max: 1, step: 0.05, value: this.#opacity, "aria-label": "Opacity of the map",
      oninput: () => {
        this.#opacity = Number(slider.value)
        for (const { fade } of shown) fade(this.#opacity)
      } })
    return h("label", { class: "row dim" }, "Map over photo", slider)
  }

  /** @param {Model} model @param {Answer} first */
  async #attention(model, first) {
    const place = this.#place
    const stop = this.#stop
    const late = setTimeout(() => this.body.replaceChildren(this.#views("attention"),
      progress("Asking for the attention of each head", () => {
        stop.abort()
        this.#asked = ""
        this.#say("Cancelled.", ["Ask again", () => this.update(model, this.#place)])
      }, BUILDING)), 400)
    try {
      const name = await attentionNear(model, model.resolve(first.node)?.name ?? first.node)
      if (!name) return h("p", { class: "note" }, "This model has no attention.")
      const { block, fade } = await attentionView(model, name, first, place, { go: this.go, opacity: this.#opacity, signal: stop.signal })
      block.append(this.#slider([{ fade }]))
      return block
    } catch (error) {
      if (stop.signal.aborted) return h("p", {})
      return failure(error, () => { this.#drawn = ""; this.#show() }, () => this.go({ w: "random" }))
    } finally {
      clearTimeout(late)
    }
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

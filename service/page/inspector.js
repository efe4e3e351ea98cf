// The right pane: the chosen node's output for a photo.

import { features } from "./answers.js"
import { Problem } from "./api.js"
import { attentionNodes, attentionView, headKnob } from "./attention.js"
import { channelAt, channelsView } from "./channels.js"
import { acrossView, agreementSides, comparesModels, otherChoices, otherOutput, severalModels, titleOf } from "./comparison.js"
import { h, keepFocus } from "./dom.js"
import { editsOf, knobsView, reaching } from "./edits.js"
import { evidenceNode, evidenceView } from "./evidence.js"
import { heading } from "./heading.js"
import { parameters } from "./numbers.js"
import { patchOf } from "./patch.js"
import { isMissing, photoOf } from "./photo.js"
import { photoPicker } from "./picker.js"
import { isStale, reduce } from "./reductions.js"
import { categories, predictionsOf, scoresOf } from "./predictions.js"
import { requestView } from "./request.js"
import { sizeChoices, sizeQuery } from "./size.js"
import { stages } from "./stages.js"
import { failure, progress, retries } from "./states.js"
import { statisticsView, valuesView } from "./statistics.js"
import { topView } from "./top.js"
import { CAVEAT, VIEWS, meaning, viewSides } from "./views.js"

/** @typedef {import("./answers.js").Answer} Answer */
/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./model.js").NodeInfo} NodeInfo */
/** @typedef {import("./place.js").Place} Place */

/** Models with more parameters run only after a click: they take a minute and gigabytes. */
const LARGE_MODEL = 150e6
/** How long the last answer stays before progress is shown, in milliseconds: most answers come sooner. */
const PROGRESS_DELAY = 400

const BUILDING = "the weights are being loaded and the extractor is being built"

export class Inspector {
  /** @type {Answer[]} */ #answers = []
  /** @type {import("./comparison.js").Other | null} */ #other = null
  #requested = ""
  /** The request that the answers are to, and how often answers came. */ #answered = ""
  #times = 0
  #rendered = ""
  /** What the predictions are for. */ #subject = ""
  #abort = new AbortController()
  /** @type {Set<string>} */ #confirmed = new Set()
  #hasAttention = false
  /** @type {Place} */ #place = {}
  /** @type {Model | null} */ #model = null

  /**
   * @param {HTMLElement} pane
   * @param {{go: (changes: Record<string, string | number | null>, replace?: boolean) => void, choose: (path: string) => void,
   *   take: (files: Iterable<File>) => void, remove: (photo: import("./photo.js").Photo) => void, refresh: () => void}} actions
   */
  constructor(pane, { go, choose, take, remove, refresh }) {
    this.pane = pane
    this.go = go
    this.choose = choose
    this.take = take
    this.remove = remove
    this.refresh = refresh
    this.head = h("div", { class: "pane-head" })
    this.picker = h("div", {})
    this.further = h("div", { class: "row dim others" })
    this.said = h("div", { class: "said" })
    this.body = h("div", { class: "body" })
    this.foot = h("div", { class: "body" })
  }

  /** @param {Model} model @param {Place} place */
  async update(model, place) {
    this.#model = model
    this.#place = place
    const { n: name = "" } = place
    const node = model.resolve(name)
    if (this.body.parentElement !== this.pane) this.pane.replaceChildren(this.head, this.picker, this.said, this.body, this.foot)
    if (!this.#typing(place)) keepFocus(this.picker, () => this.picker.replaceChildren(
      model.takesPhotos && node ? photoPicker(model, place, this.go, this.take, this.remove, sizeChoices(model, place, this.go), this.further) : ""))
    this.#offerOthers(model, place)
    const wanted = [model.name, model.weights, name, place.p ?? "", place.p2 ?? "", place.n2 ?? "", place.m2 ?? "", place.w2 ?? "", place.z ?? "", place.f ?? "", place.e ?? ""].join("\n")
    const known = wanted === this.#requested
    const subject = [model.name, model.weights, place.p, place.p2, place.m2, place.w2, place.z, place.f, place.e].join("\n")
    if (subject !== this.#subject) this.said.replaceChildren()
    this.#subject = subject
    this.#describe(model, name, known && this.#answered === wanted ? this.#answers[0] : null)
    if (known) return this.#show()
    this.stop()
    const why = unanswerable(model, node, name)
    if (why) {
      // An npy file holds one tensor without a name.
      const suffix = model.inputs.length > 1 ? "safetensors" : "npy"
      this.foot.replaceChildren(node?.extractable ? requestView(model, { node: name, transforms: [], id: null }, { name: `tensors.${suffix}`, type: `application/x-${suffix}` }, null, {}) : "")
      return this.#message(why)
    }
    if (!this.runs(model)) return this.#confirm(model)
    this.#requested = wanted
    await this.#request(model, name, place)
  }

  /** Describe the chosen node above its output. @param {Model} model @param {string} name @param {Answer | null} answer */
  #describe(model, name, answer) {
    const node = model.resolve(name)
    keepFocus(this.head, () => this.head.replaceChildren(
      ...(node ? heading(model, node, name, this.choose, (w) => this.go({ w }), answer?.shape ?? null) : [])))
  }

  /** Abort the request under way. */
  stop() {
    this.#abort.abort()
    this.#requested = this.#answered = this.#rendered = ""
  }

  /** @param {Model} model @param {string} name @param {Place} place */
  async #request(model, name, place) {
    const stop = (this.#abort = new AbortController())
    const waiting = this.#progress(`Computing ${name} of ${model.name}`)
    this.body.classList.add("waiting")
    const late = setTimeout(() => {
      this.body.replaceChildren(waiting)
      photoOf(place.p).then((photo) => stop.signal.aborted || this.#offer({ node: name, transforms: [], id: null }, photo, null), () => {})
    }, this.#answers.length ? PROGRESS_DELAY : 0)
    try {
      const first = await photoOf(place.p)
      const edits = reaching(editsOf(place), model, name)
      /** @type {Array<{photo: import("./photo.js").Photo, name: string, edits?: import("./edits.js").Edit[]}>} */
      const pairs = [{ photo: first, name }]
      if (edits.length) pairs.push({ photo: first, name, edits })
      if (place.p2) pairs.push({ photo: await photoOf(place.p2), name })
      if (place.n2 && !comparesModels(place)) pairs.push({ photo: first, name: place.n2 })
      /** @type {import("./comparison.js").Other} */ const computed = { model: null }
      const known = (/** @type {Model} */ other) => this.#offerOthers(model, this.#place, computed.model = other)
      const compared = otherOutput(model, place, first, (one) => this.runs(one), known, stop.signal)
      compared.catch(() => {}) // where the first fails, nothing waits for it
      const [attention, ...answers] = await Promise.all([attentionNodes(model),
        ...pairs.map(({ photo, name, edits }) => features(model, name, photo, stop.signal, sizeQuery(place), edits))])
      const arrive = async (/** @type {import("./comparison.js").Other | null} */ other) => {
        if (stop.signal.aborted) return
        this.#hasAttention = attention.names.length > 0
        this.#other = other
        this.#offerOthers(model, this.#place) // another view may have been chosen before this model was known
        this.#answers = other?.answer ? [...answers, other.answer] : answers
        this.#answered = this.#requested
        this.#times++
        clearTimeout(late)
        waiting.remove()
        this.body.classList.remove("waiting")
        this.#describe(model, name, answers[0])
        await this.#show()
        this.#predict(stop.signal)
      }
      // The first maps do not wait for those of another model, which may have to be downloaded.
      const soon = await Promise.race([compared, new Promise((resolve) => setTimeout(resolve, PROGRESS_DELAY))])
      if (soon !== undefined) return await arrive(soon)
      const what = `Computing ${place.n2 ?? name} of ${place.m2 || model.name}${place.w2 ? ` ${place.w2}` : ""}`
      computed.waiting = this.#progress(what)
      const [other] = await Promise.all([compared, arrive(computed)])
      await arrive(other)
    } catch (error) {
      if (stop.signal.aborted) return
      this.#requested = ""
      this.#answers = []
      const photo = await photoOf(place.p).catch(() => null) // a sample may be what cannot be had
      if (stop.signal.aborted) return
      if (photo) this.#offer({ node: name, transforms: [], id: null }, photo, null)
      else this.foot.replaceChildren()
      this.#fail(error, photo)
    } finally {
      clearTimeout(late)
      waiting.remove()
      if (this.#abort === stop) this.body.classList.remove("waiting")
    }
  }

  /** Whether text in a field of the comparison is not chosen yet: a field that is moved or replaced would choose or lose it. @param {Place} place */
  #typing({ m2, w2 }) {
    return Boolean(m2 !== undefined || w2) && [...this.further.querySelectorAll("input")].some((input) => input.value !== input.defaultValue)
  }

  /** The choice of another model. @param {Model} model @param {Place} place @param {Model | null} [other] once it is known */
  #offerOthers(model, place, other = this.#other?.model ?? null) {
    if (!this.#typing(place)) keepFocus(this.further, () => this.further.replaceChildren(...otherChoices(model, place, other, this.go)))
  }

  /** Say what classifiers see in the photos, after their first maps are shown. @param {AbortSignal} signal */
  async #predict(signal) {
    const times = this.#times, [{ model }] = this.#answers
    // It says less than the maps do: where it cannot be had, they stay alone.
    const found = await predictionsOf(this.#answers, this.#place, signal, (k) => this.#explain(model, k)).catch(() => [])
    if (!signal.aborted && times === this.#times) this.said.replaceChildren(...found)
  }

  /** Show the request below its output. @param {import("./request.js").Wanted} wanted @param {{name: string, type: string, url?: string | null}} file @param {Answer | null} answer */
  #offer(wanted, file, answer) {
    const model = this.#model
    if (model) keepFocus(this.foot, () => this.foot.replaceChildren(requestView(model, wanted, file, answer, this.#size)))
  }

  /** @param {unknown} error @param {import("./photo.js").Photo | null} photo */
  #fail(error, photo) {
    const own = photo?.url ? null : photo
    const bad = error instanceof Problem && /\/(bad-image|image-too-large)$/.test(error.type)
    this.body.replaceChildren(bad
      ? failure(error, ["Choose another photo", () => /** @type {HTMLElement | null} */ (this.picker.querySelector(".photo.add"))?.click()],
          ...own ? [/** @type {import("./states.js").Action} */ (["Remove this one", () => this.remove(own)])] : [])
      : failure(error, ...retries(error, () => { this.#requested = ""; this.refresh() }, () => this.go({ w: "random" }))),
      knobsView(editsOf(this.#place), [], this.go)) // what was refused can be taken back
  }

  async #show() {
    const [first, second] = this.#answers
    const model = this.#model
    if (!first || !model || this.#answered !== this.#requested) return // those of the place before
    const place = this.#place
    const view = first.maps ? (this.#views.find(([name]) => name === place.v)?.[0] ?? "channels") : "values"
    const wanted = [this.#requested, this.#times, view, place.y, place.ch, place.s, place.r, place.at, place.head, place.q, place.k].join("\n")
    if (wanted === this.#rendered) return
    this.#rendered = wanted
    const blocks = document.createDocumentFragment()
    /** @type {HTMLElement[]} */ let rest = []
    if (isMissing(place.p) || isMissing(place.p2)) blocks.append(h("p", { class: "note" }, "This link was made with a photo that it cannot carry. A sample is shown instead."))
    /** What the numbers and the request below the maps are of. */
    let shown = this.#answers, request = /** @type {import("./request.js").Wanted} */ ({ node: first.node, transforms: [], id: null })
    let offered = /** @type {Answer | undefined} */ (undefined), heads = 0, rows = /** @type {boolean[]} */ ([])
    /** An answer among several. @param {Answer} one */
    const named = ({ model, photo, node, edits }) =>
      `${severalModels(shown) ? titleOf(model) : photo.title}${view === "attention" ? "" : `, ${node}`}${edits.length ? ", edited" : ""}`
    try {
      if (view === "values") blocks.append(...await Promise.all(this.#answers.filter(({ maps }) => !maps).map(async (one) =>
        valuesView(one, one.shape.length === 2 ? await categories(one.model) : [], second ? `: ${named(one)}` : ""))))
      else if (view === "attention") {
        const { elements, weights } = await this.#attention(place)
        rest = elements
        shown = weights.map(({ answer }) => answer)
        rows = weights.map(({ first }) => first !== null)
        if (weights.length) {
          request = { node: shown[0].node, ...weights[0].request }
          heads = shown[0].shape.at(-3) ?? 0
        }
      } else if (view === "why") {
        const { elements, ...found } = await this.#evidence(model, place)
        rest = elements
        offered = found.answer
        request = { ...request, ...found.request, node: offered?.node ?? first.node }
      } else rest = await this.#maps(view, place)
    } catch (error) {
      if (wanted !== this.#rendered || isStale(error)) return
      this.#offer(request, first.photo, first)
      return this.#fail(error, first.photo)
    }
    if (this.#other && !this.#other.answer) blocks.append(this.#unanswered(this.#other))
    if (view !== "values") blocks.append(this.#choices(view), ...rest.slice(0, 1))
    if (this.#other?.answer) blocks.append(...acrossView(first, this.#other.answer, view, place, this.go))
    if (view !== "why") blocks.append(knobsView(editsOf(place), this.#knobs(view, request.node, heads), (changes) => this.go(changes)))
    blocks.append(...rest.slice(1))
    for (const [i, one] of shown.entries()) {
      const title = view === "attention" ? `${rows[i] ? "The query's" : "All"} weights of ${one.node}` : "All values"
      blocks.append(statisticsView(one.statistics, second ? `${title}: ${named(one)}` : title))
    }
    if (wanted !== this.#rendered) return // the choice has changed meanwhile
    const top = this.pane.scrollTop
    keepFocus(this.body, () => this.body.replaceChildren(blocks))
    offered ??= shown.find(({ edits }) => edits.length) ?? shown[0]
    if (offered) this.#offer({ ...request, what: second ? named(offered) : "" }, offered.photo, offered)
    this.pane.scrollTop = top
  }

  /** The views that the model has. */
  get #views() {
    const had = { attention: this.#hasAttention, why: this.#model !== null && !!scoresOf(this.#model), agreement: !!this.#other?.answer?.maps }
    return VIEWS.filter(([name]) => had[/** @type {keyof had} */ (name)] ?? true)
  }

  /** What of a node can be turned: what is looked at, then all of it. @param {string} view @param {string} node @param {number} heads of its attention */
  #knobs(view, node, heads) {
    const [{ maps }] = this.#answers
    const { at } = this.#place
    if (view === "attention") {
      const knob = this.#model && headKnob(this.#model, node, this.#place, heads)
      return knob ? [knob] : []
    }
    /** @type {import("./edits.js").Knob[]} */ const knobs = [{ text: "Its whole output", edit: { node } }]
    if (!maps) return knobs
    const { row, column } = patchOf(at, maps)
    knobs.unshift({ text: `Position ${row}, ${column}`, edit: { node, box: [column, row, column + 1, row + 1] } })
    const channel = channelAt(this.#answers[0], this.#place)
    if (view === "channels") knobs.unshift({ text: `Channel ${channel}`, edit: { node, channels: [channel] } })
    return knobs
  }

  /** What every request asks for. */
  get #size() {
    return sizeQuery(this.#place)
  }

  /** @param {string} view */
  #choices(view) {
    return h("div", { class: "segments", role: "group", "aria-label": "View" }, ...this.#views.map(([name, text]) =>
      h("button", { type: "button", "aria-pressed": String(name === view), onclick: () => this.go({ v: name }, true) }, text)))
  }

  /** @param {string} view @param {Place} place */
  async #maps(view, place) {
    const [first] = this.#answers
    const channel = channelAt(first, place)
    const other = this.#other?.answer
    if (view === "agreement" && other) return [await this.#stages(agreementSides(first, other)), h("p", { class: "dim" },
      `The cosine of both vectors at each position. ${CAVEAT}`)]
    const scales = !other ? "nodes" : place.y === "own" ? "own" : "one"
    const stage = await this.#stages(viewSides(this.#answers, view, channel, scales))
    if (view === "channels") {
      const top = this.#model && topView(this.#model, first.node, channel)
      return [stage, ...(top ? [top] : []), ...await channelsView(first, place.s, channel, place.r === "same", (changes) => this.go(changes, true))]
    }
    return [stage, h("p", { class: "dim" }, meaning(view, this.#answers))]
  }

  /** @param {Place} place */
  async #attention(place) {
    const late = this.#later("attention", "Computing attention weights")
    try {
      const { sides, choices, weights } = await attentionView(this.#answers, place, this.go, this.#abort.signal, this.#size)
      const help = h("p", { class: "dim" }, "What the position under the pointer attends to. Click or use the arrow keys to fix a position. Bits say how widely a head looks.")
      return { elements: [await this.#stages(sides), ...choices, help], weights }
    } finally {
      clearTimeout(late)
    }
  }

  /** Show the evidence for a class: at the chosen node, or at one with positions. @param {Model} model @param {number} k */
  #explain(model, k) {
    const node = this.#answers[0]?.maps ? this.#place.n : evidenceNode(model)
    this.go({ v: "why", k, ...(node ? { n: node } : {}) }, node === this.#place.n)
  }

  /** @param {Model} model @param {Place} place */
  async #evidence(model, place) {
    const scores = scoresOf(model)
    if (!scores) return { elements: [] }
    const names = await categories(model)
    const first = this.#answers[0]
    const { slot } = await features(model, scores.name, first.photo, this.#abort.signal, this.#size)
    const values = await reduce("values", { slot, most: scores.shape?.at(-1) ?? 0 })
    const largest = values.reduce((/** @type {number} */ best, /** @type {number} */ value, /** @type {number} */ i) => (value > (values[best] ?? -Infinity) ? i : best), -1)
    if (largest < 0 && !place.k) return { elements: [h("p", { class: "note" }, `The scores of ${first.photo.title} are not numbers: no class is the likeliest.`)] }
    const index = Number(place.k ?? largest) || 0
    const name = names[index] ?? `class ${index}`
    const late = this.#later("why", `Differentiating ${name}`)
    try {
      const { sides, ...found } = await evidenceView(this.#answers.filter(({ edits }) => !edits.length), { index, name }, this.#abort.signal, this.#size)
      return { elements: [await this.#stages(sides), h("p", { class: "dim" }, `Grad-CAM: where at this node the evidence for ${name} lies. Choose another class above.`)], ...found }
    } finally {
      clearTimeout(late)
    }
  }

  /** @param {import("./stages.js").Side[]} sides */
  #stages(sides) {
    return stages(sides, this.#size, this.#place.at, (at) => this.go({ at }, true))
  }

  /** Show progress in place of a view, if it takes long and is still wanted then. @param {string} view @param {string} what */
  #later(view, what) {
    const wanted = this.#rendered
    return setTimeout(() => {
      if (wanted === this.#rendered) this.body.replaceChildren(this.#choices(view), this.#progress(what))
    }, PROGRESS_DELAY)
  }

  /** Progress of a request that can be cancelled. @param {string} what */
  #progress(what) {
    return progress(what, () => {
      this.stop()
      this.#message("Cancelled.", ["Try again", this.refresh])
    }, BUILDING)
  }

  /** Why the other model has no output to compare with. @param {import("./comparison.js").Other} other */
  #unanswered({ model, error, large, waiting }) {
    if (waiting) return waiting
    const again = () => {
      this.#requested = ""
      this.refresh()
    }
    if (!large || !model) return failure(error, ...retries(error, again, () => this.go({ w2: "random" })))
    return h("div", {}, h("p", { class: "note" }, heavy(model)), h("button", { type: "button", class: "primary", onclick: () => {
      this.#confirmed.add(model.name)
      again()
    } }, "Compute"))
  }

  /** Whether a model may be run: a large one only after a click. @param {Model} model */
  runs(model) {
    return model.totals.params <= LARGE_MODEL || this.#confirmed.has(model.name)
  }

  /** @param {Model} model */
  #confirm(model) {
    this.foot.replaceChildren()
    this.#message(heavy(model), ["Compute", () => {
      this.#confirmed.add(model.name)
      this.refresh()
    }])
  }

  /** @param {string} text @param {[string, () => void]} [action] */
  #message(text, action) {
    this.body.classList.remove("waiting")
    this.body.replaceChildren(h("p", { class: "note", role: "status" }, text),
      action ? h("button", { type: "button", class: "primary", onclick: action[1] }, action[0]) : "")
  }
}

/** @param {Model} model */
const heavy = ({ name, totals }) => `${name} has ${parameters(totals.params)}: this may take a minute and gigabytes of memory.`

/** Why there is no output for a photo; empty where there is one. @param {Model} model @param {NodeInfo | null} node @param {string} name */
function unanswerable(model, node, name) {
  if (!node) return name ? `${model.name} has no node ${name}. Choose one in the tree or in the graph.` : "Choose a node."
  if (!node.extractable) return `The output of ${node.name} is not a tensor.`
  if (model.takesPhotos) return ""
  return `${model.name} takes tensors (${model.inputs.map((one) => `${one.name}: ${one.layout}`).join(", ")}), not photos. Send them by the request below.`
}

// The middle pane while no model is chosen: a first picture, and where to begin.

import { features } from "./answers.js"
import { askJson } from "./api.js"
import { listed, withoutTimm } from "./catalogue.js"
import { h } from "./dom.js"
import { loadModel } from "./model.js"
import { photoOf } from "./photo.js"
import { photoChoices } from "./picker.js"
import { kept, link } from "./place.js"
import { evidenceNode } from "./evidence.js"
import { predictionsView } from "./predictions.js"
import { panel } from "./panel.js"
import { viewSides } from "./views.js"

/** @typedef {import("./place.js").Place} Place */

/** The model of the first picture: its weights are a package. */
const TRAINED = "efficientnet_lite0"

/** Where to begin: one model of each kind. @type {Array<[string, string]>} */
const FIRST = [
  [TRAINED, "trained, and nothing to download"],
  ["resnet50", "convolutions and shortcuts"],
  ["vit_b_16", "patches, tokens, attention"],
  ["timm.vit_small_patch14_dinov2", "DINOv2: parts of things without labels"],
  ["swin_t", "attention in shifted windows"],
  ["convnext_tiny", "a convolutional network after transformers"],
  ["fasterrcnn_resnet50_fpn", "a detector's feature pyramid"],
  ["mobilenet_v3_small", "small enough for a phone"],
]

/**
 * @param {Place} place
 * @param {{go: import("./picker.js").Go, take: (files: Iterable<File>) => void, remove: (photo: import("./photo.js").Photo) => void}} actions
 */
export async function welcome(place, { go, take, remove }) {
  const known = new Set((await withoutTimm()).map((one) => one.name))
  const view = h("div", { class: "showcase", hidden: !known.has(TRAINED) })
  const starts = h("ul", { class: "plain-list starts" })
  const rows = new Map(FIRST.map(([name, what]) => [name,
    h("li", {}, h("a", { href: link({ m: name, ...kept(place) }) }, h("strong", {}, name), h("span", { class: "dim" }, what)))]))
  begin()
  return {
    element: h("div", { class: "welcome" },
      h("h1", { tabindex: -1 }, "Look inside a vision model"),
      h("p", {}, "Choose a model. Walk its graph, open its modules, and see the output of every node for a photo. Each picture comes from an API request that you can copy."),
      photoChoices(place, go, take, remove),
      view,
      starts),
    /** Compute the first picture, then begin with timm's models too. @param {AbortSignal} signal */
    async picture(signal) {
      if (!view.hidden) await first(signal)
      signal.throwIfAborted()
      if (!(await listed("")).timm?.models) return
      for (const name of rows.keys()) {
        if (!name.startsWith("timm.")) continue
        const { models } = await askJson(`v1/models?source=timm&q=${name}`)
        if (models.some((/** @type {{name: string}} */ one) => one.name === name)) known.add(name)
      }
      begin()
    },
  }

  /** Those that are there already stay in the page, so that they keep the focus. */
  function begin() {
    let at = 0
    for (const [name, row] of rows)
      if (known.has(name)) {
        if (starts.children[at] !== row) starts.insertBefore(row, starts.children[at] ?? null)
        at++
      }
  }

  /** @param {AbortSignal} signal */
  async function first(signal) {
    view.replaceChildren(h("p", { class: "dim", role: "status" }, `Looking at it with ${TRAINED}…`))
    try {
      await showcase(view, place, go, signal)
    } catch {
      // The models below say what is wrong, once one is chosen.
      view.hidden = true
    }
  }
}

/** Show a map of a trained model over the photo, then what it says. @param {HTMLElement} view @param {Place} place @param {import("./picker.js").Go} go @param {AbortSignal} signal */
async function showcase(view, place, go, signal) {
  const [model, photo] = await Promise.all([loadModel(TRAINED, undefined, signal), photoOf(place.p)])
  const answer = await features(model, "C4", photo, signal)
  const sides = viewSides([answer], "pca", 0)
  const figures = await Promise.all(sides.map((side) => ("note" in side ? h("p", {}, side.note) : panel({
    ...side, preprocessing: model.preprocessing, opacity: 0.8, label: `${side.label} of ${side.node} over ${photo.title}`,
    caption: "Equal colours: alike to the model", patch: null, point: () => {}, choose: () => {},
  }).then(({ figure }) => figure))))
  view.replaceChildren(...figures)
  const said = await predictionsView(model, photo, signal, (k) => go({ m: TRAINED, n: evidenceNode(model), v: "why", k }))
  view.append(h("div", { class: "stacked-list" },
    h("p", {}, "What ", h("strong", {}, TRAINED), ", which is here with its trained weights, says of this photo:"), said ?? "",
    h("p", {}, h("a", { class: "button primary", href: link({ m: TRAINED, ...kept(place) }) }, "Look inside it"))))
}

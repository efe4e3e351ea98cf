// The middle pane while no model is chosen.

import { listed } from "./catalogue.js"
import { h } from "./dom.js"
import { isMissing } from "./photo.js"
import { kept, link } from "./place.js"

/** Where to begin: one model of each kind. @type {Array<[string, string]>} */
const FIRST = [
  ["resnet50", "convolutions and shortcuts"],
  ["vit_b_16", "patches, tokens, attention"],
  ["swin_t", "attention in shifted windows"],
  ["convnext_tiny", "a convolutional network after transformers"],
  ["fasterrcnn_resnet50_fpn", "a detector's feature pyramid"],
  ["mobilenet_v3_small", "small enough for a phone"],
]

/** @param {import("./place.js").Place} place */
export function welcome(place) {
  const start = (/** @type {string} */ name, /** @type {string} */ what) =>
    h("li", {}, h("a", { href: link({ m: name, ...kept(place) }) }, h("strong", {}, name), h("span", { class: "dim" }, what)))
  const starts = h("ul", { class: "plain-list starts" }, ...FIRST.map(([name, what]) => start(name, what)))
  // The first one has trained weights on this machine, where a package brought them.
  listed("packaged").then(({ models }) => starts.prepend(...models.slice(0, 1).map(
    (/** @type {{name: string}} */ { name }) => start(name, "trained, and nothing to download")))).catch(() => {})
  return h("div", { class: "welcome" },
    h("h1", { tabindex: -1 }, "Look inside a vision model"),
    h("p", {}, "Choose a model. Walk its graph, open its modules, and see the output of every node for a photo. Each picture comes from an API request that you can copy."),
    place.p?.startsWith("own") && !isMissing(place.p) ? h("p", { class: "badge", role: "status" }, "Your photo is here: choose a model to look at it.") : "",
    starts)
}

// Tabs that choose the pane on a narrow screen, which shows one at a time.

import { byId, h } from "./dom.js"
import { go } from "./place.js"

/** @type {Array<[string, string]>} */
const TABS = [["models", "Model"], ["graph", "Graph"], ["features", "Features"]]

/** @param {import("./place.js").Place} place */
export function showTabs(place) {
  const shown = place.t ?? (place.m ? "features" : "models")
  document.body.dataset.tab = shown
  byId("tabs").replaceChildren(...TABS.map(([name, text]) =>
    h("button", { type: "button", "aria-pressed": String(name === shown), onclick: () => go({ t: name }, true) }, text)))
}

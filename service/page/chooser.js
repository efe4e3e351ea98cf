// The left pane while a model is chosen: its weights, levels, a search, and the module tree.

import { byId, h, select } from "./dom.js"
import { flops, parameters } from "./numbers.js"
import { kept, link, place } from "./place.js"
import { Tree } from "./tree.js"

/** @typedef {import("./model.js").Model} Model */

/**
 * @param {HTMLElement} pane
 * @param {Model} model
 * @param {{weights: (name: string) => void, choose: (path: string) => void, toggle: (path: string) => void,
 *   search: (wanted: string) => void}} actions
 */
export function showChooser(pane, model, actions) {
  const tree = new Tree(model, actions)
  let wanted = ""
  /** @type {Set<string>} */ let open = new Set()
  /** @type {string | null} */ let chosen = null
  const search = h("input", {
    type: "search", placeholder: "Search nodes", "aria-label": "Search nodes",
    oninput: () => { wanted = search.value.trim().toLowerCase(); actions.search(wanted); show() },
    onkeydown: (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" && wanted) tree.chooseFirst()
      else if (event.key === "ArrowDown") tree.focus()
      else return
      event.preventDefault()
    },
  })
  const levels = Object.entries(model.levels)
  const models = h("a", { href: "#", class: "quiet" }, "All models")
  pane.replaceChildren(
    h("div", { class: "pane-head" },
      h("div", { class: "title-row" }, h("h2", { tabindex: -1 }, model.name), models),
      h("p", { class: "dim" }, `${parameters(model.totals.params)}, ${flops(model.totals.flops)}, ${model.totals.nodes} nodes`),
      h("label", { class: "stacked" }, "Weights", select("Weights", weightOptions(model), model.weights, actions.weights)),
      levels.length
        ? h("div", { class: "levels", role: "group", "aria-label": "Levels" }, h("span", { class: "dim" }, "Levels"),
            ...levels.map(([name, { node, stride, channels }]) =>
              h("button", { type: "button", class: "pill", title: `${node}: stride ${stride}, ${channels} channels`,
                "data-node": node, onclick: () => actions.choose(name) }, name)))
        : null,
      closedParts(model),
      search),
    tree.element,
  )

  function show() {
    tree.show(open, chosen, wanted)
    for (const pill of pane.querySelectorAll(".levels .pill"))
      pill.setAttribute("aria-pressed", String(pill.getAttribute("data-node") === chosen))
  }

  return {
    /** @param {Set<string> | null} nowOpen null for those that are open already @param {string | null} nowChosen */
    update(nowOpen, nowChosen) {
      models.href = link(kept(place()))
      open = nowOpen ?? open
      chosen = nowChosen
      show()
    },
  }
}

/** The modules that torch.fx could not trace, and why. @param {Model} model */
function closedParts({ closed }) {
  if (!closed.length) return null
  return h("details", { class: "dim note" },
    h("summary", {}, closed.length > 1 ? `${closed.length} modules were not traced` : "1 module was not traced"),
    ...closed.map(({ path, reason }) => h("p", {}, h("strong", {}, path), `: ${reason}`)))
}

/** The weights that a model may have, and what is to be known of each. @param {Model} model @returns {Array<[string, string]>} */
export function weightOptions(model) {
  /** @type {Array<[string, string]>} */
  const options = Object.entries(model.weightsKnown).map(([name, { cached }]) => {
    const notes = [name === model.defaultWeights ? "default" : "", cached ? "" : "to be downloaded"].filter(Boolean)
    return [name, notes.length ? `${name} (${notes.join(", ")})` : name]
  })
  if (!options.some(([name]) => name === model.weights) && model.weights !== "random") options.push([model.weights, model.weights])
  return [...options, ["random", "random (untrained)"]]
}

/** Set the line at the top, and the tab's title. @param {string} text */
export function showWhere(text) {
  byId("where").textContent = text
  byId("where").hidden = !text
  document.title = text ? `${text} · fxserve` : "fxserve"
}

// Extractors of one node: for repeated requests, transforms and profiles.

import { askJson } from "./api.js"

/** @typedef {import("./model.js").Model} Model */

/** Make an extractor of one node. @param {Model} model @param {string} node @param {string[]} [transforms] @param {AbortSignal} [signal] */
export function makeExtractor(model, node, transforms = [], signal = undefined) {
  const spec = { model: model.name, weights: model.weights, return_nodes: [node], transforms }
  return askJson("v1/extractors", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(spec), signal,
  })
}

/** Milliseconds of each node on a photograph. @param {Model} model @param {AbortSignal} signal */
export async function measured(model, signal) {
  const last = model.nodes.findLast((node) => node.extractable)
  const { id } = await makeExtractor(model, last?.name ?? "", [], signal)
  const { profile } = await askJson(`v1/extractors/${id}/graph?profile=true`, { signal })
  return new Map(profile.nodes.map((/** @type {any} */ node) => [node.name, node.milliseconds]))
}

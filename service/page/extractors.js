// Extractors: for repeated requests, transforms and profiles.

import { askJson } from "./api.js"

/** @typedef {import("./model.js").Model} Model */

/**
 * Make an extractor of some nodes.
 * @param {Model} model @param {{nodes: string[], transforms?: string[], query?: Record<string, string>}} wanted @param {AbortSignal} [signal]
 */
export function makeExtractor(model, { nodes, transforms = [], query = {} }, signal = undefined) {
  const size = query.image_size ? { image_size: query.image_size.includes("x") ? query.image_size.split("x").map(Number) : Number(query.image_size) } : {}
  const fit = query.fit ? { fit: query.fit } : {}
  const spec = { model: model.name, weights: model.weights, return_nodes: nodes, transforms,
    ...(query.precision ? { precision: query.precision } : {}), ...size, ...fit }
  return askJson("v1/extractors", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(spec), signal,
  })
}

/** Milliseconds of each node on a photograph. @param {Model} model @param {AbortSignal} signal */
export async function measured(model, signal) {
  const last = model.nodes.findLast((node) => node.extractable)
  const { id } = await makeExtractor(model, { nodes: [last?.name ?? ""] }, signal)
  const { profile } = await askJson(`v1/extractors/${id}/graph?profile=true`, { signal })
  return new Map(profile.nodes.map((/** @type {any} */ node) => [node.name, node.milliseconds]))
}

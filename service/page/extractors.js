// Extractors: for repeated requests, transforms and profiles.

import { askJson } from "./api.js"

/** @typedef {import("./model.js").Model} Model */

/**
 * Make an extractor of some nodes.
 * @param {Model} model @param {{nodes: string[], transforms?: string[], query?: Record<string, string>}} wanted @param {AbortSignal} [signal]
 */
export function makeExtractor(model, { nodes, transforms = [], query = {} }, signal = undefined) {
  const spec = specOf(model.name, model.weights, nodes, transforms, query)
  return askJson("v1/extractors", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(spec), signal,
  })
}

/**
 * @param {string} model @param {string} weights @param {string[]} nodes @param {string[]} transforms
 * @param {Record<string, string>} query of a request in one step, which has more than concerns the extractor
 */
export function specOf(model, weights, nodes, transforms, { precision, image_size: size, fit }) {
  return { model, weights, return_nodes: nodes, transforms, ...(precision ? { precision } : {}), ...(size ? { image_size: sidesOf(size) } : {}), ...(fit ? { fit } : {}) }
}

/** A size as JSON and Python have it. @param {string} size `448` or `448x672` */
export const sidesOf = (size) => (size.includes("x") ? size.split("x").map(Number) : Number(size))

/** Milliseconds of each node on a photograph. @param {Model} model @param {AbortSignal} signal */
export async function measured(model, signal) {
  const last = model.nodes.findLast((node) => node.extractable)
  const { id } = await makeExtractor(model, { nodes: [last?.name ?? ""] }, signal)
  const { profile } = await askJson(`v1/extractors/${id}/graph?profile=true`, { signal })
  return new Map(profile.nodes.map((/** @type {any} */ node) => [node.name, node.milliseconds]))
}

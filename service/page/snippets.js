// The request that was made, as curl and as Python.

import { sidesOf, specOf } from "./extractors.js"
import { storedKey } from "./key.js"

/**
 * @typedef {object} Request
 * @property {string} model
 * @property {string} weights
 * @property {string[]} nodes
 * @property {string[]} transforms of the graph; with any, an extractor is made first
 * @property {string | null} id of that extractor, once it is known
 * @property {Record<string, string>} query what is asked of the features beside the nodes
 * @property {import("./edits.js").Edit[]} edits
 * @property {string} file the photo's name
 * @property {string} type the photo's media type
 * @property {string | null} url from where a sample is copied first
 * @property {{of: string, target: number} | null} evidence asked for at the node, for one value of a classifier's node; null for features
 * @property {boolean} locked whether the service wants a key
 */

/** @param {string} text */
const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`

/** @param {string} text */
const python = (text) => JSON.stringify(text)

/** A name for the file that curl writes. @param {string} name */
const fileName = (name) => name.replaceAll(/[^A-Za-z0-9._-]+/g, "-")

/** @param {string} path @param {Record<string, string>} [query] */
function address(path, query = {}) {
  const text = new URLSearchParams(query).toString().replaceAll("%2C", ",").replaceAll("%3A", ":")
  return `${new URL(path, document.baseURI)}${text ? `?${text}` : ""}`
}

/**
 * A request for nodes of a model.
 * @param {import("./model.js").Model} model @param {string[]} nodes @param {{name: string, type: string, url?: string | null}} file that is sent
 * @param {Partial<Request>} [more]
 * @returns {Request}
 */
export function requestOf({ name: model, weights }, nodes, { name: file, type, url = null }, more = {}) {
  return { model, weights, nodes, transforms: [], id: null, query: {}, edits: [], evidence: null, file, type, url, locked: storedKey() !== null, ...more }
}

/** The path and the query of the request for features, or for evidence. @param {Request} request */
export function featureAddress({ model, weights, nodes, transforms, id, query, evidence }) {
  if (evidence) return { path: `v1/models/${encodeURIComponent(model)}/attributions`, query: { of: evidence.of, at: nodes[0], target: String(evidence.target), weights, ...query } }
  const { image_size: _, fit: __, ...asked } = query // which the extractor has
  if (transforms.length) return { path: `v1/extractors/${id ?? "ID"}/features`, query: asked }
  return { path: `v1/models/${encodeURIComponent(model)}/features`, query: { nodes: nodes.join(","), weights, ...query } }
}

/** @param {Request} request */
export function curl(request) {
  const key = request.locked ? [`  -H "Authorization: Bearer $FXSERVE_KEY"`] : []
  const { path, query } = featureAddress(request)
  const { edits } = request
  const features = (request.url ? `curl -sSO ${shell(address(request.url))}\n` : "") + [
    ...(edits.length ? [`printf ${shell(`{"images": ["%s"], "edits": ${JSON.stringify(edits).replaceAll("%", "%%")}}`)} "$(base64 < ${shell(request.file)} | tr -d '\\n')" |`] : []),
    "curl -sS",
    ...key,
    `  -H ${shell(`Content-Type: ${edits.length ? "application/json" : request.type}`)}`,
    "  -H 'Accept: application/x-safetensors'",
    `  --data-binary ${edits.length ? "@-" : shell(`@${request.file}`)}`,
    `  ${shell(address(path, query))}`,
    `  -o ${shell(`${fileName(request.nodes.length > 1 ? request.model : request.nodes[0])}.safetensors`)}`,
  ].join(" \\\n")
  if (!request.transforms.length) return features
  const { model, weights, nodes, transforms } = request
  const spec = JSON.stringify(specOf(model, weights, nodes, transforms, request.query))
  const make = ["curl -sS", ...key, "  -H 'Content-Type: application/json'", `  -d ${shell(spec)}`, `  ${shell(address("v1/extractors"))}`]
  return `${make.join(" \\\n")}\n${features}`
}

/** How Python reads a file of tensors, by its media type; photos are sent as they are. @type {Record<string, {from: string, read: string}>} */
const READERS = {
  "application/x-npy": { from: "from numpy import load", read: "load" },
  "application/x-safetensors": { from: "from safetensors.numpy import load_file", read: "load_file" },
}

/** @param {Request} request */
export function pythonCode({ model, weights, nodes, transforms, query, edits, evidence, file, type, url, locked }) {
  const server = new URL(".", document.baseURI).toString().replace(/\/$/, "")
  const options = [
    weights === "DEFAULT" ? "" : `weights=${python(weights)}`,
    transforms.length ? `transforms=[${transforms.map(python).join(", ")}]` : "",
    query.precision ? `precision=${python(query.precision)}` : "",
    query.image_size ? `image_size=${JSON.stringify(sidesOf(query.image_size)).replace(",", ", ")}` : "",
    query.fit ? `fit=${python(query.fit)}` : "",
  ].filter(Boolean)
  const how = ["pool", "dtype", "normalize"].filter((name) => query[name]).map((name) => `, ${name}=${python(query[name])}`).join("") + (query.tokens ? `, tokens=[${query.tokens}]` : "") + (edits.length ? `, edits=${JSON.stringify(edits)}` : "")
  const asked = evidence ? `.attributions(${python(file)}, of=${python(evidence.of)}, at=${python(nodes[0])}, target=${evidence.target})` : ""
  const reader = READERS[type]
  const imports = [locked ? "import os\n" : "", url ? "from urllib.request import urlretrieve\n" : "", locked || url ? "\n" : "", reader ? `${reader.from}\n` : ""].join("")
  return `${imports}from service.client import Client

${url ? `urlretrieve(${python(address(url))}, ${python(file)})\n` : ""}with Client(${python(server)}${locked ? `, headers={"Authorization": f"Bearer {os.environ['FXSERVE_KEY']}"}` : ""}) as client:
    extractor = client.extractor(${python(model)}, [${nodes.map(python).join(", ")}]${options.map((one) => `, ${one}`).join("")})
    features = extractor${asked || `(${reader ? `${reader.read}(${python(file)})` : python(file)}${how})`}
for name, values in features.items():
    print(name, values.shape, values.dtype)
`
}

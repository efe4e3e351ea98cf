// The request that was made, as curl and as Python.

/**
 * @typedef {object} Request
 * @property {string} path
 * @property {Record<string, string>} query
 * @property {string} key the tensor's name in the answer
 * @property {string} file the photo's name
 * @property {string} type the photo's media type
 * @property {boolean} locked whether the service wants a key
 */

/** @param {string} text */
const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`

/** @param {string} text */
const python = (text) => JSON.stringify(text)

/** A name for the file that curl writes. @param {string} name */
const fileName = (name) => name.replaceAll(/[^A-Za-z0-9._-]+/g, "-")

/** @param {Request} request */
function address({ path, query }) {
  const text = new URLSearchParams(query).toString().replaceAll("%2C", ",").replaceAll("%3A", ":")
  return `${new URL(path, document.baseURI)}?${text}`
}

/** @param {Request} request */
export function curl(request) {
  return [
    "curl -sS",
    ...(request.locked ? [`  -H "Authorization: Bearer $FXSERVE_KEY"`] : []),
    `  -H ${shell(`Content-Type: ${request.type}`)}`,
    "  -H 'Accept: application/x-safetensors'",
    `  --data-binary ${shell(`@${request.file}`)}`,
    `  ${shell(address(request))}`,
    `  -o ${shell(`${fileName(request.key)}.safetensors`)}`,
  ].join(" \\\n")
}

/** @param {Request} request */
export function pythonCode(request) {
  const headers = [
    `"Content-Type": ${python(request.type)}`,
    `"Accept": "application/x-safetensors"`,
    ...(request.locked ? [`"Authorization": f"Bearer {os.environ['FXSERVE_KEY']}"`] : []),
  ]
  return `${request.locked ? "import os\n" : ""}from pathlib import Path

import httpx
from safetensors.numpy import load

answer = httpx.post(
    ${python(new URL(request.path, document.baseURI).toString())},
    params={${Object.entries(request.query).map(([name, value]) => `${python(name)}: ${python(value)}`).join(", ")}},
    headers={${headers.join(", ")}},
    content=Path(${python(request.file)}).read_bytes(),
    timeout=60,
)
answer.raise_for_status()
features = load(answer.content)[${python(request.key)}]
print(features.shape, features.dtype)
`
}

// Files of safetensors: eight bytes of length, a JSON header, and the tensors' bytes.

/**
 * @typedef {object} Tensor
 * @property {string} dtype as safetensors has it: F32, F16, I64, …
 * @property {number[]} shape
 * @property {Float32Array} data
 */

/**
 * The tensors of a file by name, as 32-bit floats whatever they are stored as.
 * @param {ArrayBuffer} buffer
 * @returns {Map<string, Tensor>}
 */
export function parse(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true))
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)))
  /** @type {Map<string, Tensor>} */
  const tensors = new Map()
  delete header.__metadata__
  for (const [name, { dtype, shape, data_offsets: [start, end] }] of Object.entries(header)) {
    tensors.set(name, { dtype, shape, data: floats(dtype, buffer.slice(8 + length + start, 8 + length + end)) })
  }
  return tensors
}

/** The value of each 16-bit float, once one was met. @type {Float32Array | null} */
let halves = null

function halfFloats() {
  return Float32Array.from({ length: 1 << 16 }, (_, bits) => {
    const exponent = (bits >> 10) & 31, fraction = bits & 1023
    const size = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction
    return bits & 0x8000 ? -size : size
  })
}

/** @param {string} dtype @param {ArrayBuffer} bytes @returns {Float32Array} */
function floats(dtype, bytes) {
  if (dtype === "F32") return new Float32Array(bytes)
  if (dtype === "F64") return Float32Array.from(new Float64Array(bytes))
  if (dtype === "I64") return Float32Array.from(new BigInt64Array(bytes), Number)
  if (dtype === "U64") return Float32Array.from(new BigUint64Array(bytes), Number)
  if (dtype === "I32") return Float32Array.from(new Int32Array(bytes))
  if (dtype === "U32") return Float32Array.from(new Uint32Array(bytes))
  if (dtype === "I16") return Float32Array.from(new Int16Array(bytes))
  if (dtype === "U16") return Float32Array.from(new Uint16Array(bytes))
  if (dtype === "U8" || dtype === "BOOL") return Float32Array.from(new Uint8Array(bytes))
  if (dtype === "I8") return Float32Array.from(new Int8Array(bytes))
  if (dtype === "F16") return Float32Array.from(new Uint16Array(bytes), (half) => (halves ??= halfFloats())[half])
  if (dtype === "BF16") {
    const wide = Uint32Array.from(new Uint16Array(bytes), (half) => half << 16)
    return new Float32Array(wide.buffer)
  }
  throw new Error(`values of type ${dtype} cannot be shown`)
}

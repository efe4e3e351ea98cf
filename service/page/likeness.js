// How alike two models see one photo: cosines by position, and linear CKA. No DOM: the worker runs it.

/** @typedef {import("./maps.js").Maps} Maps */

/** Of the grid that linear CKA is computed on: its cost grows with the square of the positions. */
const MOST_SIDE = 20

/** Whether two maps have the same channels and positions. @param {Omit<Maps, "data">} one @param {Omit<Maps, "data">} other */
export const sameShape = (one, other) => one.channels === other.channels && one.height === other.height && one.width === other.width

/** The cosine similarity of the vectors at each position of two maps of one shape. @param {Maps} one @param {Maps} other */
export function cosines(one, other) {
  const size = one.height * one.width
  const dots = new Float64Array(size), left = new Float64Array(size), right = new Float64Array(size)
  for (let c = 0; c < one.channels; c++)
    for (let i = 0; i < size; i++) {
      const a = one.data[c * size + i], b = other.data[c * size + i]
      dots[i] += a * b
      left[i] += a * a
      right[i] += b * b
    }
  return Float32Array.from(dots, (dot, i) => dot / (Math.sqrt(left[i] * right[i]) || 1))
}

/**
 * Linear centred kernel alignment of two maps over their positions (Kornblith et al., 2019, "Similarity of Neural Network Representations
 * Revisited"), averaged to the coarser grid of both: 1 where one is a rotation and scaling of the other. They may differ in channels.
 * @param {Maps} one @param {Maps} other
 */
export function linearCka(one, other) {
  const height = Math.min(one.height, other.height, MOST_SIDE), width = Math.min(one.width, other.width, MOST_SIDE)
  const [a, b] = [one, other].map((maps) => gram(maps, height, width))
  return dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b))
}

/** The dot products of each two positions' vectors, centred over the positions. @param {Maps} maps @param {number} height @param {number} width */
function gram(maps, height, width) {
  const rows = averaged(maps, height, width), size = height * width, { channels } = maps
  for (let c = 0; c < channels; c++) {
    let sum = 0
    for (let i = 0; i < size; i++) sum += rows[i * channels + c]
    for (let i = 0; i < size; i++) rows[i * channels + c] -= sum / size
  }
  const products = new Float64Array(size * size)
  for (let i = 0; i < size; i++)
    for (let j = 0; j <= i; j++) {
      let sum = 0
      for (let c = 0, a = i * channels, b = j * channels; c < channels; c++) sum += rows[a + c] * rows[b + c]
      products[i * size + j] = products[j * size + i] = sum
    }
  return products
}

/** Position by position, the maps averaged over areas as PyTorch's adaptive_avg_pool2d does. @param {Maps} maps @param {number} height @param {number} width */
function averaged(maps, height, width) {
  const { channels } = maps
  const rows = new Float64Array(height * width * channels)
  /** @param {number} i @param {number} to @param {number} from @returns {[number, number]} */
  const span = (i, to, from) => [Math.floor((i * from) / to), Math.ceil(((i + 1) * from) / to)]
  for (let y = 0; y < height; y++)
    for (let x = 0; x < width; x++) {
      const [top, bottom] = span(y, height, maps.height), [left, right] = span(x, width, maps.width)
      for (let c = 0; c < channels; c++) {
        let sum = 0
        for (let r = top; r < bottom; r++)
          for (let k = left; k < right; k++) sum += maps.data[(c * maps.height + r) * maps.width + k]
        rows[(y * width + x) * channels + c] = sum / ((bottom - top) * (right - left))
      }
    }
  return rows
}

/** @param {Float64Array} one @param {Float64Array} other */
function dot(one, other) {
  let sum = 0
  for (let i = 0; i < one.length; i++) sum += one[i] * other[i]
  return sum
}

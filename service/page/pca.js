// The first three principal components over a map's positions, as red, green and blue.

/** @typedef {import("./maps.js").Maps} Maps */

const COMPONENTS = 3
const MOST_ROUNDS = 60
const CLOSE = 1e-7

/**
 * Each position's scores on the first three principal components, by orthogonal iteration, which needs no
 * covariance matrix of thousands of channels.
 * @param {Maps} maps
 * @returns {Float32Array[]} one for each component
 */
export function principalComponents(maps) {
  const size = maps.height * maps.width
  const centred = centre(maps.data, maps.channels, size)
  let directions = Array.from({ length: COMPONENTS }, (_, k) =>
    Float64Array.from({ length: maps.channels }, (_, c) => Math.sin(1 + c * (k + 1) * 0.7)),
  )
  orthonormalize(directions)
  let before = -1
  for (let round = 0; round < MOST_ROUNDS; round++) {
    const scores = directions.map((direction) => project(centred, direction, size))
    directions = scores.map((score) => gather(centred, score, maps.channels, size))
    const lengths = orthonormalize(directions)
    const now = lengths.reduce((sum, length) => sum + length, 0)
    if (Math.abs(now - before) <= CLOSE * now) break
    before = now
  }
  return directions.map((direction) => Float32Array.from(project(centred, direction, size)))
}

/**
 * The components as colours, each from its 1st to its 99th percentile.
 * @param {Maps} maps
 */
export function rgb(maps) {
  const size = maps.height * maps.width
  const result = new Uint8ClampedArray(size * COMPONENTS)
  principalComponents(maps).forEach((values, k) => {
    const sorted = values.slice().sort()
    const low = sorted[Math.floor(0.01 * (size - 1))]
    const high = sorted[Math.ceil(0.99 * (size - 1))]
    for (let i = 0; i < size; i++) result[i * COMPONENTS + k] = ((values[i] - low) / (high - low || 1)) * 255
  })
  return result
}

/** @param {Float32Array} data @param {number} channels @param {number} size */
function centre(data, channels, size) {
  const result = new Float32Array(data.length)
  for (let c = 0; c < channels; c++) {
    let sum = 0
    for (let i = c * size; i < (c + 1) * size; i++) sum += data[i]
    const mean = sum / size
    for (let i = c * size; i < (c + 1) * size; i++) result[i] = Number.isFinite(mean) ? data[i] - mean : 0
  }
  return result
}

/** @param {Float32Array} data @param {Float64Array} direction @param {number} size */
function project(data, direction, size) {
  const result = new Float64Array(size)
  for (let c = 0; c < direction.length; c++)
    for (let i = 0, start = c * size; i < size; i++) result[i] += direction[c] * data[start + i]
  return result
}

/** @param {Float32Array} data @param {Float64Array} score @param {number} channels @param {number} size */
function gather(data, score, channels, size) {
  const result = new Float64Array(channels)
  for (let c = 0; c < channels; c++)
    for (let i = 0, start = c * size; i < size; i++) result[c] += score[i] * data[start + i]
  return result
}

/** Gram and Schmidt; the largest entry of each is made positive. @param {Float64Array[]} vectors their lengths */
function orthonormalize(vectors) {
  return vectors.map((vector, k) => {
    for (const other of vectors.slice(0, k)) {
      const along = dot(vector, other)
      for (let i = 0; i < vector.length; i++) vector[i] -= along * other[i]
    }
    const length = Math.sqrt(dot(vector, vector))
    const largest = vector.reduce((best, value) => (Math.abs(value) > Math.abs(best) ? value : best), 0)
    const scale = (largest < 0 ? -1 : 1) / (length || 1)
    for (let i = 0; i < vector.length; i++) vector[i] *= scale
    return length
  })
}

/** @param {Float64Array} one @param {Float64Array} other */
function dot(one, other) {
  let sum = 0
  for (let i = 0; i < one.length; i++) sum += one[i] * other[i]
  return sum
}

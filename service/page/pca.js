// The first three principal components over a map's positions, as red, green and blue.

/** @typedef {import("./maps.js").Maps} Maps */

const COMPONENTS = 3
const MOST_ROUNDS = 60
const CLOSE = 1e-7

/** The components of more positions are those of this many, evenly spread: they differ by less than can be seen. */
const MOST_POSITIONS = 4096

/**
 * Each position's scores on the first three principal components of all positions of the maps, by orthogonal
 * iteration, which needs no covariance matrix of thousands of channels.
 * @param {Maps[]} all with the same channels
 * @returns {Float32Array[][]} of each of `all`, one for each component
 */
export function principalComponents(all) {
  const { channels } = all[0]
  const { data, size } = sampled(all)
  const means = centre(data, channels, size)
  let directions = Array.from({ length: COMPONENTS }, (_, k) =>
    Float64Array.from({ length: channels }, (_, c) => Math.sin(1 + c * (k + 1) * 0.7)),
  )
  orthonormalize(directions)
  let before = -1
  for (let round = 0; round < MOST_ROUNDS; round++) {
    const scores = directions.map((direction) => project(data, direction, size))
    directions = scores.map((score) => gather(data, score, channels, size))
    const lengths = orthonormalize(directions)
    const now = lengths.reduce((sum, length) => sum + length, 0)
    if (Math.abs(now - before) <= CLOSE * now) break
    before = now
  }
  return all.map((maps) => directions.map((direction) => {
    const centred = dot(means, direction)
    return Float32Array.from(project(maps.data, direction, maps.height * maps.width), (score) => score - centred)
  }))
}

/**
 * The components as colours, each from its 1st to its 99th percentile over all of the maps.
 * @param {Maps[]} all with the same channels
 */
export function rgb(all) {
  const found = principalComponents(all)
  const scales = Array.from({ length: COMPONENTS }, (_, k) => {
    const values = found.map((scores) => scores[k])
    const sorted = Float32Array.from(values.flatMap((one) => [...one])).sort()
    const low = sorted[Math.floor(0.01 * (sorted.length - 1))], high = sorted[Math.ceil(0.99 * (sorted.length - 1))]
    return { low, size: high - low || 1 }
  })
  return found.map((scores) => {
    const result = new Uint8ClampedArray(scores[0].length * COMPONENTS)
    scores.forEach((values, k) => values.forEach((value, i) => (result[i * COMPONENTS + k] = ((value - scales[k].low) / scales[k].size) * 255)))
    return result
  })
}

/** Positions of all the maps, as many as are needed. @param {Maps[]} all */
function sampled(all) {
  const { channels } = all[0]
  const total = all.reduce((sum, { height, width }) => sum + height * width, 0)
  const step = Math.max(1, total / MOST_POSITIONS)
  const kept = all.map(({ height, width }) => Math.max(1, Math.floor((height * width) / step)))
  const size = kept.reduce((sum, count) => sum + count, 0)
  const data = new Float32Array(channels * size)
  let start = 0
  all.forEach((maps, number) => {
    const own = maps.height * maps.width
    for (let c = 0; c < channels; c++)
      for (let i = 0; i < kept[number]; i++) data[c * size + start + i] = maps.data[c * own + Math.floor(i * step)]
    start += kept[number]
  })
  return { data, size }
}

/** Subtract each channel's mean, in place; channels that are not finite become zero. @param {Float32Array} data @param {number} channels @param {number} size */
function centre(data, channels, size) {
  const means = new Float64Array(channels)
  for (let c = 0; c < channels; c++) {
    let sum = 0
    for (let i = c * size; i < (c + 1) * size; i++) sum += data[i]
    means[c] = Number.isFinite(sum) ? sum / size : 0
    for (let i = c * size; i < (c + 1) * size; i++) data[i] = Number.isFinite(sum) ? data[i] - means[c] : 0
  }
  return means
}

/** @param {Float32Array} data @param {Float64Array} direction @param {number} size */
function project(data, direction, size) {
  const result = new Float64Array(size)
  for (let c = 0; c < direction.length; c++)
    // Channels that are not finite have no part in any direction.
    if (direction[c]) for (let i = 0, start = c * size; i < size; i++) result[i] += direction[c] * data[start + i]
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

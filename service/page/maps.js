// Feature maps from tensors of any layout, and their reductions. No DOM: the worker runs it.

/** @typedef {{height: number, width: number, prefix: number, class_token: boolean}} Grid of tokens, as the service describes it */

/**
 * @typedef {object} Maps
 * @property {Float32Array} data channel by channel, row by row
 * @property {number} channels
 * @property {number} height
 * @property {number} width
 */

/**
 * The maps of the first image; null where the tensor is not a map.
 * @param {{shape: number[], data: Float32Array}} tensor
 * @param {string | null} layout as in the graph
 * @param {Grid | null} tokens
 * @returns {Maps | null}
 */
export function asMaps({ shape, data }, layout, tokens) {
  if (!data.length) return null // as of no channels
  if (layout === "NCHW" && shape.length === 4) {
    const [, channels, height, width] = shape
    return { data: data.subarray(0, channels * height * width), channels, height, width }
  }
  if (layout === "NHWC" && shape.length === 4) {
    const [, height, width, channels] = shape
    return { data: channelsFirst(data, 0, height * width, channels), channels, height, width }
  }
  if (tokens && shape.length === 3) {
    const { height, width, prefix } = tokens
    const [, length, channels] = shape
    // Tokens before the grid have no position: ViT's class token, and registers.
    if (length === prefix + height * width) return { data: channelsFirst(data, prefix, height * width, channels), channels, height, width }
  }
  return null
}

/** @param {Float32Array} data @param {number} skip @param {number} places @param {number} channels */
function channelsFirst(data, skip, places, channels) {
  const result = new Float32Array(places * channels)
  for (let p = 0; p < places; p++)
    for (let c = 0; c < channels; c++) result[c * places + p] = data[(skip + p) * channels + c]
  return result
}

/**
 * Minimum, maximum, mean, standard deviation and histogram of the finite values, share of zeros, and how many are not finite.
 * @param {Float32Array} values
 * @param {number} [bins]
 */
export function statistics(values, bins = 48) {
  let min = Infinity, max = -Infinity, sum = 0, squares = 0, zeros = 0, finite = 0
  for (const value of values) {
    if (!Number.isFinite(value)) continue
    finite++
    if (value < min) min = value
    if (value > max) max = value
    if (value === 0) zeros++
    sum += value
    squares += value * value
  }
  const counts = new Uint32Array(bins)
  const scale = max > min ? bins / (max - min) : 0
  for (const value of values)
    if (Number.isFinite(value)) counts[Math.min(bins - 1, Math.floor((value - min) * scale))]++
  const mean = finite ? sum / finite : NaN
  const deviation = Math.sqrt(Math.max(0, squares / finite - mean * mean))
  return { count: values.length, min, max, mean, deviation, zeros: values.length && zeros / values.length,
           notFinite: values.length - finite, counts: [...counts] }
}

/** @param {Maps} maps @param {number} channel */
export function channelOf(maps, channel) {
  const size = maps.height * maps.width
  return maps.data.slice(channel * size, (channel + 1) * size)
}

/**
 * The mean magnitude of each channel and the standard deviation over its positions, of the finite values; zero where there are none.
 * @param {Maps} maps
 */
export function channelFacts(maps) {
  const size = maps.height * maps.width
  const strength = new Float32Array(maps.channels), variation = new Float32Array(maps.channels)
  for (let c = 0; c < maps.channels; c++) {
    let magnitude = 0, sum = 0, finite = 0
    for (let i = c * size; i < (c + 1) * size; i++) {
      const value = maps.data[i]
      if (!Number.isFinite(value)) continue
      finite++
      magnitude += Math.abs(value)
      sum += value
    }
    if (!finite) continue
    const mean = sum / finite
    let squares = 0
    for (let i = c * size; i < (c + 1) * size; i++) if (Number.isFinite(maps.data[i])) squares += (maps.data[i] - mean) ** 2
    strength[c] = magnitude / finite
    variation[c] = Math.sqrt(squares / finite)
  }
  return { strength, variation }
}

/** The mean magnitude over the channels, at each position. @param {Maps} maps */
export function magnitude(maps) {
  const size = maps.height * maps.width
  const result = new Float32Array(size)
  for (let c = 0; c < maps.channels; c++)
    for (let i = 0; i < size; i++) result[i] += Math.abs(maps.data[c * size + i])
  return result.map((sum) => sum / maps.channels)
}

/**
 * Cosine similarity of each position to one of them.
 * @param {Maps} maps
 * @param {number} row
 * @param {number} column
 */
export function similarity(maps, row, column) {
  const size = maps.height * maps.width
  const here = row * maps.width + column
  const dots = new Float32Array(size)
  const squares = new Float32Array(size)
  for (let c = 0; c < maps.channels; c++) {
    const start = c * size
    const query = maps.data[start + here]
    for (let i = 0; i < size; i++) {
      const value = maps.data[start + i]
      dots[i] += query * value
      squares[i] += value * value
    }
  }
  return dots.map((dot, i) => dot / (Math.sqrt(squares[i] * squares[here]) || 1))
}

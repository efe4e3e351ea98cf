// Attention weights as a map: how much one position attends to each other. No DOM: the worker runs it.

/**
 * @typedef {object} Grid as the service describes it
 * @property {number} height
 * @property {number} width
 * @property {number} prefix
 * @property {[number, number] | null} window
 * @property {[number, number]} shift
 */

/**
 * A row of the weights of one image, position by position; NaN outside the query's window.
 * @param {{shape: number[], data: Float32Array}} weights `[N, heads, L, L]`, or `[N, windows, heads, L, L]`
 * @param {Grid} grid
 * @param {number | null} head null for the mean of all
 * @param {number} row @param {number} column of the query
 */
export function attended({ shape, data }, { height, width, prefix, window, shift }, head, row, column) {
  const [heads, length] = [shape[shape.length - 3], shape[shape.length - 1]]
  const find = window ? cut(height, width, window, shift) : (/** @type {number} */ r, /** @type {number} */ c) => [0, prefix + r * width + c]
  const [own, query] = find(row, column)
  const result = new Float32Array(height * width).fill(NaN)
  const rows = head === null ? [...Array(heads).keys()] : [head]
  for (let r = 0; r < height; r++)
    for (let c = 0; c < width; c++) {
      const [other, key] = find(r, c)
      if (other !== own) continue
      let sum = 0
      for (const one of rows) sum += data[((own * heads + one) * length + query) * length + key]
      result[r * width + c] = sum / rows.length
    }
  return result
}

/**
 * The window of a position, and its number in it: the padded map is rolled, then cut into windows.
 * @param {number} height @param {number} width @param {[number, number]} window @param {[number, number]} shift
 */
function cut(height, width, [high, wide], [up, left]) {
  const rows = Math.ceil(height / high) * high, columns = Math.ceil(width / wide) * wide
  return (/** @type {number} */ row, /** @type {number} */ column) => {
    const r = (row - up + rows) % rows, c = (column - left + columns) % columns
    return [Math.floor(r / high) * (columns / wide) + Math.floor(c / wide), (r % high) * wide + (c % wide)]
  }
}

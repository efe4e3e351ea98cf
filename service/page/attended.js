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
 * The window of a query, and its number in it.
 * @param {Grid} grid @param {number} row @param {number} column @param {number | null} token
 */
export function queryAt({ height, width, prefix, window, shift }, row, column, token) {
  if (token !== null) return [0, token]
  return window ? cut(height, width, window, shift)(row, column) : [0, prefix + row * width + column]
}

/**
 * A row of the weights of one image, position by position; NaN outside the query's window.
 * @param {{shape: number[], data: Float32Array}} weights `[N, heads, L, L]`, or `[N, windows, heads, L, L]`; or of the query alone
 * @param {Grid} grid
 * @param {number | null} head null for the mean of all
 * @param {number} row @param {number} column of the query
 * @param {number | null} [token] number of the query before the grid, as the class token's, in place of a position
 */
export function attended({ shape, data }, grid, head, row, column, token = null) {
  const { height, width, prefix, window, shift } = grid
  const [heads, queries, length] = shape.slice(-3)
  const find = window ? cut(height, width, window, shift) : (/** @type {number} */ r, /** @type {number} */ c) => [0, prefix + r * width + c]
  const [own, query] = queryAt(grid, row, column, token)
  const at = queries === 1 ? 0 : query
  const result = new Float32Array(height * width).fill(NaN)
  const rows = head === null ? [...Array(heads).keys()] : [head]
  for (let r = 0; r < height; r++)
    for (let c = 0; c < width; c++) {
      const [other, key] = find(r, c)
      if (other !== own) continue
      let sum = 0
      for (const one of rows) sum += data[((own * heads + one) * queries + at) * length + key]
      result[r * width + c] = sum / rows.length
    }
  return result
}

/**
 * In bits, how widely each head spreads one query's attention: 0 where all of it is at one position.
 * @param {{shape: number[], data: Float32Array}} weights @param {Grid} grid @param {number} row @param {number} column @param {number | null} token
 */
export function entropies({ shape, data }, grid, row, column, token) {
  const [heads, queries, length] = shape.slice(-3)
  const [own, query] = queryAt(grid, row, column, token)
  const at = queries === 1 ? 0 : query
  return [...Array(heads).keys()].map((head) => {
    const start = ((own * heads + head) * queries + at) * length
    return -data.subarray(start, start + length).reduce((sum, share) => sum + (share > 0 ? share * Math.log2(share) : 0), 0)
  })
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

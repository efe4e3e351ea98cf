// Values to colours: matplotlib's perceptually uniform "inferno" from minimum to maximum; for values on both sides of
// zero ColorBrewer's "RdBu", blue below zero and red above, with the same length on both sides.

/** At 0, 1/8, … 1 and linear between. */
const INFERNO = tabulated([
  [0, 0, 4], [31, 12, 72], [85, 15, 109], [136, 34, 106], [186, 54, 85], [227, 89, 51], [249, 140, 10],
  [249, 201, 50], [252, 255, 164],
])
const DIVERGING = tabulated([
  [33, 102, 172], [67, 147, 195], [146, 197, 222], [209, 229, 240], [247, 247, 247], [253, 219, 199], [244, 165, 130],
  [214, 96, 77], [178, 24, 43],
])

/** @param {number[][]} points */
function tabulated(points) {
  const table = new Uint8ClampedArray(256 * 3)
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * 8
    const low = Math.min(7, Math.floor(at))
    for (let c = 0; c < 3; c++) table[i * 3 + c] = points[low][c] + (at - low) * (points[low + 1][c] - points[low][c])
  }
  return table
}

/** A colour of inferno for a share of 0 to 1, as CSS has it. @param {number} share */
export function colour(share) {
  const i = Math.round(Math.min(1, Math.max(0, share)) * 255) * 3
  return `rgb(${INFERNO[i]} ${INFERNO[i + 1]} ${INFERNO[i + 2]})`
}

/** @typedef {{low: number, high: number}} Range */

/** The minimum and maximum of the finite values of some maps. @param {...Float32Array} maps @returns {Range} */
export function range(...maps) {
  let low = Infinity, high = -Infinity
  for (const values of maps)
    for (const value of values) {
      if (value < low && value > -Infinity) low = value
      if (value > high && value < Infinity) high = value
    }
  return { low, high }
}

/**
 * A map as an image, a pixel a value; NaN is transparent.
 * @param {Float32Array} values
 * @param {number} width
 * @param {Range} range
 */
export function image(values, width, { low, high }) {
  const pixels = new ImageData(width, values.length / width)
  const signed = low < 0 && high > 0, end = Math.max(high, -low)
  const [table, start] = signed ? [DIVERGING, -end] : [INFERNO, low]
  const scale = signed ? 255 / (2 * end) : high > low ? 255 / (high - low) : 0
  for (let i = 0; i < values.length; i++) {
    if (Number.isNaN(values[i])) continue
    const from = Math.round(Math.min(255, Math.max(0, (values[i] - start) * scale))) * 3
    pixels.data.set([table[from], table[from + 1], table[from + 2], 255], i * 4)
  }
  return pixels
}

/** How much of each value there is to see: 0 for the least, or for zero where there are values on both sides of it, to 1. @param {Float32Array} values @param {Range} range */
export function weights(values, { low, high }) {
  if (low < 0 && high > 0) return values.map((value) => Math.abs(value) / Math.max(high, -low))
  return values.map((value) => (high > low ? (value - low) / (high - low) : 0))
}

/**
 * Three maps as red, green and blue.
 * @param {Uint8ClampedArray} rgb
 * @param {number} width
 */
export function rgbImage(rgb, width) {
  const pixels = new ImageData(width, rgb.length / 3 / width)
  for (let i = 0; i < rgb.length / 3; i++)
    pixels.data.set([rgb[i * 3], rgb[i * 3 + 1], rgb[i * 3 + 2], 255], i * 4)
  return pixels
}

// Values to colours: matplotlib's perceptually uniform "inferno", at 0, 1/8, … 1 and linear between.

const POINTS = [
  [0, 0, 4], [31, 12, 72], [85, 15, 109], [136, 34, 106], [186, 54, 85], [227, 89, 51], [249, 140, 10],
  [249, 201, 50], [252, 255, 164],
]

const TABLE = new Uint8ClampedArray(256 * 3)
for (let i = 0; i < 256; i++) {
  const at = (i / 255) * 8
  const low = Math.min(7, Math.floor(at))
  for (let c = 0; c < 3; c++) TABLE[i * 3 + c] = POINTS[low][c] + (at - low) * (POINTS[low + 1][c] - POINTS[low][c])
}

/** A colour of the same scale for a share of 0 to 1, as CSS has it. @param {number} share */
export function colour(share) {
  const i = Math.round(Math.min(1, Math.max(0, share)) * 255) * 3
  return `rgb(${TABLE[i]} ${TABLE[i + 1]} ${TABLE[i + 2]})`
}

/** The minimum and maximum of the finite values. @param {Float32Array} values */
export function range(values) {
  let low = Infinity, high = -Infinity
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
 * @param {number} low
 * @param {number} high
 */
export function image(values, width, low, high) {
  const pixels = new ImageData(width, values.length / width)
  const scale = high > low ? 255 / (high - low) : 0
  for (let i = 0; i < values.length; i++) {
    if (Number.isNaN(values[i])) continue
    const from = Math.round(Math.min(255, Math.max(0, (values[i] - low) * scale))) * 3
    pixels.data.set([TABLE[from], TABLE[from + 1], TABLE[from + 2], 255], i * 4)
  }
  return pixels
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

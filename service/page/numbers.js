// Numbers as people read them.

/** @param {number} value @param {string} unit */
function scaled(value, unit) {
  for (const [size, letter] of /** @type {Array<[number, string]>} */ ([[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]))
    if (value >= 0.9995 * size) return `${(value / size).toPrecision(3)} ${letter}${unit}`
  return `${value} ${unit}`.trim()
}

/** Those of convolutions and products of matrices; zero where a node has neither. @param {number} value */
export const flops = (value) => (value ? scaled(value, "FLOPs") : "FLOPs not counted")

/** @param {number} value */
export const parameters = (value) => `${scaled(value, "").trim()} parameters`

/** @param {number} value */
export const megabytes = (value) => scaled(value, "B")

/** @param {number} value */
export function short(value) {
  if (!Number.isFinite(value)) return String(value)
  if (value === 0) return "0"
  const size = Math.abs(value)
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)))
}

/** @param {Array<number | null> | null} shape */
export const shapeText = (shape) => (shape ? shape.map((size) => size ?? "N").join(" × ") : "no tensor")

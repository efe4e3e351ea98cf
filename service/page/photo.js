// Photos: the samples, and one's own, which are chosen, dropped or pasted.

import { ask } from "./api.js"

/**
 * @typedef {object} Photo
 * @property {string} name
 * @property {string} type
 * @property {Blob} data as it is sent
 * @property {ImageBitmap | null} bitmap null where this browser cannot show it
 */

/** Samples that the service has. */
export const SAMPLES = ["chelsea", "astronaut", "coffee", "rocket"]

/** What the URL calls a photo of this tab, which it cannot carry. */
export const OWN = "own"

/** @type {Map<string, Promise<Photo>>} */
const photos = new Map()

/** @param {string} name */
export const sampleUrl = (name) => `page/${name}.jpg`

/**
 * The photo of that name: a sample, or one of this tab; the first sample where the name is of another tab.
 * @param {string | undefined} name
 */
export function photoOf(name) {
  const known = name !== undefined && (photos.has(name) || SAMPLES.includes(name)) ? name : SAMPLES[0]
  const found = photos.get(known) ?? sample(known)
  photos.set(known, found)
  found.catch(() => photos.delete(known)) // the next call tries again
  return found
}

/** Whether the URL names a photo of another tab. @param {string | undefined} name */
export const isMissing = (name) => name !== undefined && !photos.has(name) && !SAMPLES.includes(name)

/** @param {string} name */
async function sample(name) {
  const answer = await ask(sampleUrl(name))
  return opened(`${name}.jpg`, await answer.blob())
}

/** @param {string} name @param {Blob} data @returns {Promise<Photo>} */
async function opened(name, data) {
  const bitmap = await createImageBitmap(data).catch(() => null)
  return { name, type: data.type || "application/octet-stream", data, bitmap }
}

let given = 0

/** The names of this tab's photos, the oldest first. */
export const ownPhotos = () => [...photos.keys()].filter((name) => !SAMPLES.includes(name))

/** Take a file as a photo of this tab; returns its name in the URL. @param {File} file */
export function take(file) {
  const name = given++ ? `${OWN}${given}` : OWN
  photos.set(name, opened(file.name || "photo", file))
  return name
}

/**
 * Call `taken` with every image that is dropped or pasted.
 * @param {(file: File) => void} taken
 */
export function watchDrops(taken) {
  /** @param {DataTransfer | null} data */
  const first = (data) => [...(data?.files ?? [])].find((file) => file.type.startsWith("image/"))
  addEventListener("dragover", (event) => {
    event.preventDefault()
    document.body.classList.add("dropping")
  })
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping")
  })
  addEventListener("drop", (event) => {
    event.preventDefault()
    document.body.classList.remove("dropping")
    const file = first(event.dataTransfer)
    if (file) taken(file)
  })
  addEventListener("paste", (event) => {
    const file = first(event.clipboardData)
    if (file) taken(file)
  })
}

/**
 * The region of a photo that the model sees after resize and crop, in the photo's pixels; beyond the edge is padding.
 * @param {any} preprocessing as the service describes it
 * @param {number} width
 * @param {number} height
 */
export function visibleRegion({ resize_size: resize, crop_size: crop, max_size: most, pad_to_multiple_of: multiple }, width, height) {
  let scaleX = 1, scaleY = 1
  if (resize?.length === 2) [scaleY, scaleX] = [resize[0] / height, resize[1] / width]
  else if (resize) {
    scaleX = resize[0] / Math.min(width, height)
    if (most) scaleX = Math.min(scaleX, most / Math.max(width, height))
    scaleY = scaleX
  }
  if (crop) {
    const [high, wide] = [crop[0] / scaleY, crop[crop.length - 1] / scaleX]
    return { x: (width - wide) / 2, y: (height - high) / 2, width: wide, height: high }
  }
  /** @param {number} size @param {number} scale */
  const padded = (size, scale) => (multiple ? (Math.ceil(Math.floor(size * scale) / multiple) * multiple) / scale : size)
  return { x: 0, y: 0, width: padded(width, scaleX), height: padded(height, scaleY) }
}

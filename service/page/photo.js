// Photos: the samples, and one's own, which are chosen, dropped or pasted and stay in this browser.

import { ask } from "./api.js"
import { opaque } from "./opaque.js"
import { store, stored, unstore } from "./store.js"

/**
 * @typedef {object} Photo
 * @property {string} name
 * @property {string} type
 * @property {Blob} data as it is sent
 * @property {ImageBitmap | null} bitmap without transparency; null where this browser cannot show it
 */

/** Samples that the service has. */
export const SAMPLES = ["chelsea", "astronaut", "coffee", "rocket"]

/** @type {Map<string, Promise<Photo>>} */
const photos = new Map()

/** @param {string} name */
export const sampleUrl = (name) => `page/${name}.jpg`

/**
 * The photo of that name: a sample, or one's own; the first sample where the name is of another browser.
 * @param {string | undefined} name
 */
export function photoOf(name) {
  const known = name !== undefined && (photos.has(name) || SAMPLES.includes(name)) ? name : SAMPLES[0]
  const found = photos.get(known) ?? sample(known)
  photos.set(known, found)
  found.catch(() => photos.delete(known)) // the next call tries again
  return found
}

/** Whether the URL names a photo that this browser does not have. @param {string | undefined} name */
export const isMissing = (name) => name !== undefined && !photos.has(name) && !SAMPLES.includes(name)

/** @param {string} name */
async function sample(name) {
  const answer = await ask(sampleUrl(name))
  return opened(`${name}.jpg`, await answer.blob())
}

/** @param {string} name @param {Blob} data @returns {Promise<Photo>} */
async function opened(name, data) {
  const decoded = await createImageBitmap(data).catch(() => null)
  const bitmap = decoded && await opaque(data, decoded).catch(() => decoded)
  // Browsers derive the type from the suffix of the file; the service recognises the format by the bytes.
  return { name, type: data.type.startsWith("image/") ? data.type : "image/*", data, bitmap }
}

/** What the URL calls one's own photos and the photos, the oldest first. @returns {Promise<Array<[string, Photo]>>} */
export function ownPhotos() {
  return Promise.all([...photos].filter(([name]) => !SAMPLES.includes(name)).map(async ([name, photo]) => [name, await photo]))
}

/** Bring back the photos that were kept when this browser was here before. */
export async function restorePhotos() {
  for (const [name, { file, title }] of await stored()) photos.set(name, opened(title, file))
}

/**
 * Take files as one's own photos, and keep them in this browser.
 * @param {Iterable<File>} files
 * @returns {Promise<{names: string[], refused: string[]}>} what the URL calls those taken, and why others are not
 */
export async function take(files) {
  /** @type {string[]} */ const names = []
  /** @type {string[]} */ const refused = []
  for (const file of files) {
    const title = file.name || "photo"
    const photo = await opened(title, file)
    const why = photo.bitmap || SERVER_ONLY.test(`${file.type} ${title}`) ? "" : UNKNOWN.find(([form]) => form.test(title) || form.test(file.type))?.[1] ?? "is not an image, or is damaged"
    if (why) refused.push(`${title} ${why}.`)
    if (why) continue
    const name = `own-${[...crypto.getRandomValues(new Uint32Array(2))].map((part) => part.toString(36)).join("")}`
    photos.set(name, Promise.resolve(photo))
    names.push(name)
    await store(name, { file, title })
  }
  return { names, refused }
}

/** Forget one's own photo. @param {Photo} photo */
export async function forget(photo) {
  const name = (await ownPhotos()).find(([, own]) => own === photo)?.[0]
  if (name === undefined) return
  photos.delete(name)
  await unstore(name)
}

/** Images that the service reads and browsers do not show. */
const SERVER_ONLY = /tiff|jp2|jpx|portable|\.(jp2|j2k|p[bgpn]m)$/i
/** Why other files cannot be taken. @type {Array<[RegExp, string]>} */
const UNKNOWN = [
  [/hei[cf]/i, "is HEIC, which cannot be read here: export it as JPEG"],
  [/svg/i, "is a drawing in SVG: export it as PNG"],
]

/**
 * Call `taken` with the files that are dropped, and with the images that are pasted.
 * @param {(files: File[]) => void} taken
 */
export function watchDrops(taken) {
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
    const files = [...(event.dataTransfer?.files ?? [])]
    if (files.length) taken(files)
  })
  addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])]
    if (files.length) taken(files)
  })
}

/**
 * The region of a photo that the model sees after resize, crop or padding, in the photo's pixels; beyond the edge is padding.
 * @param {any} preprocessing as the service describes it
 * @param {number} width
 * @param {number} height
 */
export function visibleRegion({ resize_size: resize, crop_size: crop, max_size: most, pad_to_multiple_of: multiple, fit }, width, height) {
  if (fit === "pad") {
    const scale = Math.min(resize[0] / height, resize[1] / width)
    const [high, wide] = [resize[0] / scale, resize[1] / scale]
    return { x: (width - wide) / 2, y: (height - high) / 2, width: wide, height: high }
  }
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

// Photos: the samples, and one's own, which are chosen, dropped or pasted and stay in this browser.

import { ask } from "./api.js"
import { opaque } from "./opaque.js"
import { store, stored, unstore } from "./store.js"

/**
 * @typedef {object} Photo
 * @property {string} name of its file
 * @property {string} title that no other photo has: two screenshots are both image.png
 * @property {string | null} url of a sample, from where it is copied first
 * @property {string} type
 * @property {Blob} data as it is sent
 * @property {ImageData | null} small a thumbnail; null where there is none
 * @property {ImageBitmap | null} bitmap without transparency; null where this browser cannot show it, or until it is asked for
 */

/** Samples that the service has. */
export const SAMPLES = ["chelsea", "astronaut", "coffee", "rocket"]
export const SMALL = 88
/** How many photos are decoded at once: those shown, and those shown before. One of 12 megapixels takes 48 MB. */
const MOST_DECODED = 4

/** Those known, one's own from the oldest to the newest. @type {Map<string, Photo>} */
const photos = new Map()
/** Those with their pixels, the last asked for last. @type {Map<Photo, Promise<ImageBitmap | null>>} */
const decoded = new Map()

/** @param {string} name */
export const sampleUrl = (name) => `page/${name}.jpg`

/**
 * The photo of that name, decoded: a sample, or one's own; the first sample where the name is of another browser.
 * @param {string | undefined} name
 */
export async function photoOf(name) {
  const known = name !== undefined && (photos.has(name) || SAMPLES.includes(name)) ? name : SAMPLES[0]
  if (!photos.has(known)) {
    const data = await (await ask(sampleUrl(known))).blob()
    if (!photos.has(known)) photos.set(known, { ...described(`${known}.jpg`, data), url: sampleUrl(known) })
  }
  const photo = /** @type {Photo} */ (photos.get(known))
  const pixels = decoded.get(photo) ?? decode(photo.data)
  decoded.delete(photo)
  decoded.set(photo, pixels)
  for (const oldest of [...decoded.keys()].slice(0, -MOST_DECODED)) {
    decoded.delete(oldest)
    oldest.bitmap = null
  }
  const bitmap = await pixels
  if (decoded.has(photo)) photo.bitmap = bitmap
  photo.small ??= bitmap && thumbnail(bitmap)
  return photo
}

/** Whether the URL names a photo that this browser does not have. @param {string | undefined} name */
export const isMissing = (name) => name !== undefined && !photos.has(name) && !SAMPLES.includes(name)

/** @param {string} name @param {Blob} data @param {ImageData | null} [small] @returns {Photo} */
function described(name, data, small = null) {
  const taken = new Set([...photos.values()].map(({ title }) => title))
  let title = name
  for (let number = 2; taken.has(title); number++) title = `${name} (${number})`
  return { name, title, url: null, type: data.type.startsWith("image/") ? data.type : "image/*", data, small, bitmap: null }
}

/** @param {Blob} data */
async function decode(data) {
  const bitmap = await createImageBitmap(data).catch(() => null)
  return bitmap && opaque(data, bitmap).catch(() => bitmap)
}

/** The middle of a picture as a thumbnail. @param {ImageBitmap} bitmap */
function thumbnail(bitmap) {
  const side = Math.min(bitmap.width, bitmap.height)
  const context = new OffscreenCanvas(SMALL, SMALL).getContext("2d")
  context?.drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, SMALL, SMALL)
  return context?.getImageData(0, 0, SMALL, SMALL) ?? null
}

/** What the URL calls one's own photos and the photos, the oldest first. */
export const ownPhotos = () => [...photos].filter(([name]) => !SAMPLES.includes(name))

/** Bring back the photos that were kept when this browser was here before. */
export async function restorePhotos() {
  for (const [name, photo] of await stored()) {
    if (photo.small === undefined) {
      const bitmap = await decode(photo.file)
      photo.small = bitmap && thumbnail(bitmap)
      bitmap?.close()
      await store(name, photo)
    }
    photos.set(name, described(photo.title, photo.file, photo.small))
  }
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
    const bitmap = await decode(file)
    const why = bitmap || SERVER_ONLY.test(`${file.type} ${title}`) ? "" : UNKNOWN.find(([form]) => form.test(title) || form.test(file.type))?.[1] ?? "is not an image, or is damaged"
    if (why) refused.push(`${title} ${why}.`)
    if (why) continue
    const small = bitmap && thumbnail(bitmap)
    bitmap?.close()
    const name = `own-${[...crypto.getRandomValues(new Uint32Array(2))].map((part) => part.toString(36)).join("")}`
    photos.set(name, described(title, file, small))
    names.push(name)
    await store(name, { file, title, small })
  }
  return { names, refused }
}

/** Forget one's own photo. @param {Photo} photo */
export async function forget(photo) {
  const name = ownPhotos().find(([, own]) => own === photo)?.[0]
  if (name === undefined) return
  photos.delete(name)
  decoded.delete(photo)
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

// The choice of a photo, and of what it is compared with.

import { comparisonChoice } from "./comparison.js"
import { h } from "./dom.js"
import { SAMPLES, ownPhotos, sampleUrl } from "./photo.js"

/** @typedef {import("./place.js").Place} Place */
/** @typedef {import("./photo.js").Photo} Photo */
/** @typedef {(changes: Record<string, string | number | null>, replace?: boolean) => void} Go */

/** Of a thumbnail, in CSS pixels. */
const SIDE = 44

/**
 * @param {import("./model.js").Model} model
 * @param {Place} place
 * @param {Go} go
 * @param {(files: Iterable<File>) => void} take
 * @param {(photo: Photo) => void} remove
 * @param {HTMLElement | string} sizes the choices of the input's size
 * @param {HTMLElement} further choices of what is compared with
 * @returns {Promise<() => HTMLElement>} which puts `further` there
 */
export async function photoPicker(model, place, go, take, remove, sizes, further) {
  const own = await ownPhotos()
  const photos = await photoChoices(place, go, take, remove)
  return () => h("div", { class: "picker" }, photos,
    h("div", { class: "row dim" }, h("span", { class: "by-mouse" }, "or drop or paste some"), h("span", { class: "spring" }), comparisonChoice(model, place, own, go)), further, sizes)
}

/**
 * The photos, and a button for more.
 * @param {Place} place @param {Go} go @param {(files: Iterable<File>) => void} take @param {(photo: Photo) => void} remove
 */
export async function photoChoices(place, go, take, remove) {
  const own = await ownPhotos()
  const known = place.p !== undefined && (SAMPLES.includes(place.p) || own.some(([name]) => name === place.p))
  const chosen = known ? place.p : SAMPLES[0]
  const file = h("input", { type: "file", accept: "image/*", multiple: true, class: "unseen", "aria-label": "Choose a photo", tabindex: -1,
    onchange: () => file.files?.length && take([...file.files]) })
  return h("div", { class: "photos", role: "group", "aria-label": "Photo" },
    ...own.map(([name, photo]) => h("span", { class: "own" }, choice(name, photo.name, small(photo)),
      h("button", { type: "button", class: "remove", "aria-label": `Remove ${photo.name}`, title: `Remove ${photo.name}`, onclick: () => remove(photo) }, "×"))),
    ...SAMPLES.map((name) => choice(name, `Photo ${name}`, h("img", { src: sampleUrl(name), alt: "", width: SIDE, height: SIDE }))),
    h("button", { type: "button", class: "photo add", onclick: () => file.click() }, "Choose…"), file)

  /** @param {string} name @param {string} label @param {HTMLElement} picture */
  function choice(name, label, picture) {
    return h("button", { type: "button", class: "photo", "aria-pressed": String(name === chosen), "aria-label": label, title: label,
      onclick: () => go({ p: name }) }, picture)
  }
}

/** @param {Photo} photo */
function small({ name, bitmap }) {
  if (!bitmap) return h("span", { class: "unshown" }, name.slice(name.lastIndexOf(".") + 1))
  const canvas = h("canvas", { width: 2 * SIDE, height: 2 * SIDE })
  const side = Math.min(bitmap.width, bitmap.height)
  canvas.getContext("2d")?.drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, 2 * SIDE, 2 * SIDE)
  return canvas
}

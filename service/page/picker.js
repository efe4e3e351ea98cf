// The choice of a photo, and of what it is compared with.

import { h, select } from "./dom.js"
import { SAMPLES, ownPhotos, photoOf, sampleUrl } from "./photo.js"

/** @typedef {import("./place.js").Place} Place */
/** @typedef {(changes: Record<string, string | number | null>, replace?: boolean) => void} Go */

/** Of a thumbnail, in CSS pixels. */
const SIDE = 44

/**
 * @param {Place} place
 * @param {Go} go
 * @param {(file: File) => void} take
 */
export function photoPicker(place, go, take) {
  const chosen = place.p ?? SAMPLES[0]
  const file = h("input", { type: "file", accept: "image/*", class: "unseen", "aria-label": "Choose a photo", tabindex: -1,
    onchange: () => file.files?.[0] && take(file.files[0]) })
  return h("div", { class: "picker" },
    h("div", { class: "photos", role: "group", "aria-label": "Photo" },
      ...ownPhotos().map((name, i) => choice(name, `Own photo ${i + 1}`, small(name))),
      ...SAMPLES.map((name) => choice(name, `Photo ${name}`, h("img", { src: sampleUrl(name), alt: "", width: SIDE, height: SIDE }))),
      h("button", { type: "button", class: "photo add", onclick: () => file.click() }, "Choose…"), file),
    h("div", { class: "row dim" }, h("span", {}, "or drop or paste one"), h("span", { class: "spring" }), comparison(place, go)))

  /** @param {string} name @param {string} label @param {HTMLElement} picture */
  function choice(name, label, picture) {
    return h("button", { type: "button", class: "photo", "aria-pressed": String(name === chosen), "aria-label": label, title: label,
      onclick: () => go({ p: name }) }, picture)
  }
}

/** @param {string} name */
function small(name) {
  const canvas = h("canvas", { width: 2 * SIDE, height: 2 * SIDE })
  photoOf(name).then(({ bitmap }) => {
    if (!bitmap) return
    const side = Math.min(bitmap.width, bitmap.height)
    canvas.getContext("2d")?.drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, 2 * SIDE, 2 * SIDE)
  })
  return canvas
}

/** The choice of a second photo, or of a node that stays while others are chosen. @param {Place} place @param {Go} go */
function comparison(place, go) {
  const photos = /** @type {Array<[string, string]>} */ ([
    ...ownPhotos().map((name, i) => [name, `Own photo ${i + 1}`]), ...SAMPLES.map((name) => [name, `Photo ${name}`]),
  ])
  return select("Compare with", [["", "Compare with…"], ...photos, ["node", place.n2 ? `Node ${place.n2}` : "This node, beside the next one"]],
    place.n2 ? "node" : place.p2 ?? "", (value) => {
      if (value === "node") go({ n2: place.n ?? null, p2: null })
      else go({ p2: value || null, n2: null })
    })
}

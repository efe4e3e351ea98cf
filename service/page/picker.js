// The choice of a photo, and of what it is compared with.

import { comparisonChoice } from "./comparison.js"
import { h } from "./dom.js"
import { SAMPLES, SMALL, ownPhotos, sampleUrl } from "./photo.js"
import { picture } from "./stage.js"

/** @typedef {import("./place.js").Place} Place */
/** @typedef {import("./photo.js").Photo} Photo */
/** @typedef {(changes: Record<string, string | number | null>, replace?: boolean) => void} Go */

/**
 * @param {import("./model.js").Model} model
 * @param {Place} place
 * @param {Go} go
 * @param {(files: Iterable<File>) => void} take
 * @param {(photo: Photo) => void} remove
 * @param {HTMLElement | string} sizes the choices of the input's size
 * @param {HTMLElement} further choices of what is compared with
 */
export function photoPicker(model, place, go, take, remove, sizes, further) {
  return h("div", { class: "picker" }, photoChoices(place, go, take, remove),
    h("div", { class: "row dim" }, h("span", { class: "by-mouse" }, "or drop or paste some"), h("span", { class: "spring" }), comparisonChoice(model, place, ownPhotos(), go)), further, sizes)
}

/**
 * The photos, and a button for more.
 * @param {Place} place @param {Go} go @param {(files: Iterable<File>) => void} take @param {(photo: Photo) => void} remove
 */
export function photoChoices(place, go, take, remove) {
  const own = ownPhotos()
  const known = place.p !== undefined && (SAMPLES.includes(place.p) || own.some(([name]) => name === place.p))
  const chosen = known ? place.p : SAMPLES[0]
  const file = h("input", { type: "file", accept: "image/*", multiple: true, class: "unseen", "aria-label": "Choose a photo", tabindex: -1,
    onchange: () => file.files?.length && take([...file.files]) })
  return h("div", { class: "photos", role: "group", "aria-label": "Photo" },
    ...own.map(([name, photo]) => h("span", { class: "own" }, choice(name, photo.title, shown(photo)),
      h("button", { type: "button", class: "remove", "aria-label": `Remove ${photo.title}`, title: `Remove ${photo.title}`, onclick: () => remove(photo) }, "×"))),
    ...SAMPLES.map((name) => choice(name, `Photo ${name}`, h("img", { src: sampleUrl(name), alt: "", width: SMALL / 2, height: SMALL / 2 }))),
    h("button", { type: "button", class: "photo add", onclick: () => file.click() }, "Choose…"), file)

  /** @param {string} name @param {string} label @param {HTMLElement} picture */
  function choice(name, label, picture) {
    return h("button", { type: "button", class: "photo", "aria-pressed": String(name === chosen), "aria-label": label, title: label,
      onclick: () => go({ p: name }) }, picture)
  }
}

/** @param {Photo} photo */
function shown({ name, small }) {
  return small ? picture(small) : h("span", { class: "unshown" }, name.slice(name.lastIndexOf(".") + 1))
}

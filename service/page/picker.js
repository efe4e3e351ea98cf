// Which photo is looked at, and which one beside it.

import { h } from "./dom.js"
import { SAMPLES, photoOf, sampleUrl } from "./photo.js"

/**
 * @param {import("./place.js").Place} place
 * @param {(changes: Record<string, string | number | null>, replace?: boolean) => void} go
 * @param {(file: File) => void} take
 */
export function photoPicker(place, go, take) {
  const chosen = place.p ?? SAMPLES[0]
  const file = h("input", { type: "file", accept: "image/*", class: "unseen", "aria-label": "Choose a photo", tabindex: -1,
    onchange: () => file.files?.[0] && take(file.files[0]) })
  const own = SAMPLES.includes(chosen) ? [] : [ownPhoto(chosen)]
  return h("div", { class: "picker" },
    h("div", { class: "photos", role: "group", "aria-label": "Photo" },
      ...own,
      ...SAMPLES.map((name) => h("button", { type: "button", class: "photo", "aria-pressed": String(name === chosen), "aria-label": `Photo ${name}`,
        onclick: () => go({ p: name }) }, h("img", { src: sampleUrl(name), alt: "", width: 44, height: 44 }))),
      h("button", { type: "button", class: "photo add", onclick: () => file.click() }, "Choose…"), file),
    h("div", { class: "row dim" }, h("span", {}, "or drop one, or paste it"), h("span", { class: "spring" }), beside(place, go)))
}

/** @param {string} name */
function ownPhoto(name) {
  const canvas = h("canvas", { width: 88, height: 88 })
  photoOf(name).then(({ bitmap }) => {
    if (!bitmap) return
    const side = Math.min(bitmap.width, bitmap.height)
    canvas.getContext("2d")?.drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, 88, 88)
  })
  return h("button", { type: "button", class: "photo", "aria-pressed": "true", "aria-label": "Own photo" }, canvas)
}

/** The choice of what is shown beside. @param {import("./place.js").Place} place @param {(changes: Record<string, string | null>) => void} go */
function beside(place, go) {
  const value = place.n2 ? "node" : place.p2 ?? ""
  const box = h("select", { "aria-label": "Beside it", onchange: () => {
    if (box.value === "node") go({ n2: place.n ?? null, p2: null })
    else go({ p2: box.value || null, n2: null })
  } })
  const options = [["", "Nothing beside"], ...SAMPLES.map((name) => [name, `Beside: ${name}`]), ["node", `Beside: ${place.n2 ?? "this node"}`]]
  box.append(...options.map(([option, text]) => h("option", { value: option, selected: option === value }, text)))
  return box
}

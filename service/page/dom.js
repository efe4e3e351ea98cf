// Elements: made in one expression, found, and with the keyboard's focus kept where they are replaced.

const FOCUSABLE = "button, select, input, summary, canvas[tabindex], pre[tabindex]"

/**
 * An element; attributes that begin with `on` are listeners, true sets an empty attribute, false and null set none.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Node | string | null)} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value)
    else if (value === true) element.setAttribute(name, "")
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value))
  }
  element.append(...children.filter((child) => child !== null))
  return element
}

/**
 * The element with this id, which the page has from the start.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const element = document.getElementById(id)
  if (!element) throw new Error(`the page has no #${id}`)
  return element
}

/**
 * A labelled choice of one of several values.
 * @param {string} label
 * @param {Array<[string, string]>} options value and text of each
 * @param {string} value
 * @param {(value: string) => void} changed
 */
export function select(label, options, value, changed) {
  const box = h("select", { "aria-label": label, onchange: () => changed(box.value) })
  box.append(...options.map(([option, text]) => h("option", { value: option, selected: option === value }, text)))
  return box
}

/** @param {Element} element a canvas and a summary have no identity but their order: their text changes with what they show */
const known = (element) => element.tagName + (element.matches("canvas, summary") ? "" : element.getAttribute("aria-label") ?? element.textContent)

/**
 * Replace the contents of `part`, and move the focus to the element that corresponds to the focused one.
 * @param {HTMLElement} part @param {() => void} change
 */
export function keepFocus(part, change) {
  const active = document.activeElement
  const alike = () => [...part.querySelectorAll(FOCUSABLE)].filter((element) => active && known(element) === known(active))
  const at = active && part.contains(active) ? alike().indexOf(active) : -1
  change()
  if (at >= 0 && document.activeElement !== active) /** @type {HTMLElement | undefined} */ (alike()[at])?.focus({ preventScroll: true })
}

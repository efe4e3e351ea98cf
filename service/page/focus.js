// Keeps the keyboard's focus where a part of the page is replaced.

const FOCUSABLE = "button, select, input, summary, canvas[tabindex], pre[tabindex]"

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

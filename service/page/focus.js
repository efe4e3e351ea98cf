// What has the keyboard's focus keeps it where a part of the page is drawn anew.

const FOCUSABLE = "button, select, input, canvas[tabindex], pre[tabindex]"

/** @param {Element} element canvases are told apart by their place alone: their labels say what is drawn */
const known = (element) => element.tagName + (element instanceof HTMLCanvasElement ? "" : element.getAttribute("aria-label") ?? element.textContent)

/**
 * Change what `part` holds, and give the focus to what now stands for the element that had it.
 * @param {HTMLElement} part @param {() => void} change
 */
export function keepFocus(part, change) {
  const active = document.activeElement
  const alike = () => [...part.querySelectorAll(FOCUSABLE)].filter((element) => active && known(element) === known(active))
  const at = active && part.contains(active) ? alike().indexOf(active) : -1
  change()
  if (at >= 0 && document.activeElement !== active) /** @type {HTMLElement | undefined} */ (alike()[at])?.focus({ preventScroll: true })
}

// The line between the graph and the pane beside it, which is dragged or moved by arrow keys.

import { byId } from "./dom.js"

const NAME = "fxserve-pane"
const LEAST = 320
const STEP = 40

/** Have the pane as wide as it was left. */
export function watchDivider() {
  const line = byId("divider")
  /** @param {number} wanted in pixels */
  const widen = (wanted) => {
    const width = Math.round(Math.max(LEAST, Math.min(wanted, innerWidth - 2 * LEAST)))
    document.body.style.setProperty("--pane", `${width}px`)
    line.setAttribute("aria-valuenow", String(width))
    return width
  }
  /** @param {number} wanted */
  const keep = (wanted) => {
    const width = widen(wanted)
    try { localStorage.setItem(NAME, String(width)) } catch { /* a browser that keeps nothing */ }
  }
  const now = () => byId("features").getBoundingClientRect().width
  let kept = 0
  try { kept = Number(localStorage.getItem(NAME)) } catch { /* a browser that keeps nothing */ }
  if (kept) widen(kept)
  line.addEventListener("pointerdown", (event) => line.setPointerCapture(event.pointerId))
  line.addEventListener("pointermove", (event) => { if (line.hasPointerCapture(event.pointerId)) keep(innerWidth - event.clientX) })
  line.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: STEP, ArrowRight: -STEP }[event.key]
    if (!step) return
    event.preventDefault()
    keep(now() + step)
  })
}

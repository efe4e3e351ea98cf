// The place: all state of the page, kept in the URL's fragment so that a link shows a colleague the same.
//
// m model, w weights, n node, o open modules, c what the graph is coloured by, i its pictures, p photo, p2 a second one, m2 a second model, w2
// weights of it, n2 a second node, y the scale of the maps of both, v view, ch
// channel, s order of channels and r the scale of their tiles, z size of the input and f how a photo fits it, at a patch as row,column, head
// of attention and q the token that attends, e edits in JSON, k class whose evidence is shown, t pane on a narrow screen.

/** @typedef {Record<string, string>} Place */

/** @type {Set<(place: Place) => void>} */
const listeners = new Set()

/** @returns {Place} */
export function place() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)))
}

/** @param {Place} place */
export function link(place) {
  const text = new URLSearchParams(place).toString()
  return `#${text.replaceAll("%2C", ",").replaceAll("%3A", ":").replaceAll("%2F", "/")}`
}

/** What stays when another model is chosen: the photos and the view. @param {Place} place @returns {Place} */
export function kept(place) {
  return Object.fromEntries(["p", "p2", "v"].filter((name) => name in place).map((name) => [name, place[name]]))
}

/**
 * Change parts of the place; null removes one.
 * @param {Record<string, string | number | null>} changes
 * @param {boolean} [replace] without an entry in the history
 */
export function go(changes, replace = false) {
  /** @type {Place} */
  const next = {}
  for (const [name, value] of Object.entries({ ...place(), ...changes })) if (value !== null) next[name] = String(value)
  const fragment = link(next)
  if (fragment === location.hash) return
  if (replace) history.replaceState(null, "", fragment)
  else history.pushState(null, "", fragment)
  arrive()
}

/** @param {(place: Place) => void} listener called after each move */
export function onMove(listener) {
  listeners.add(listener)
}

function arrive() {
  for (const listener of listeners) listener(place())
}

addEventListener("popstate", arrive)

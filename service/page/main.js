// The page: everything shown follows from the place in the URL, and every choice changes that place.

import { Problem, askJson, modelPath } from "./api.js"
import { relist, showCatalogue } from "./catalogue.js"
import { showChooser, showWhere } from "./chooser.js"
import { watchDivider } from "./divider.js"
import { byId, h, keepFocus } from "./dom.js"
import { measured } from "./extractors.js"
import { GraphView } from "./graph.js"
import { Inspector } from "./inspector.js"
import { showKeyButton, storedKey } from "./key.js"
import { watchKeys } from "./keys.js"
import { loadModel, modulesAbove } from "./model.js"
import { forget, isMissing, ownPhotos, photoOf, restorePhotos, take, watchDrops } from "./photo.js"
import { go, kept, link, onMove, place } from "./place.js"
import { failure, onceBack, progress, reason, retries } from "./states.js"
import { sizeQuery } from "./size.js"
import { showTabs } from "./tabs.js"
import { welcome } from "./welcome.js"

/** @typedef {import("./model.js").Model} Model */

/** The value of `o` where every module is expanded. */
const ALL = "*"
/** Of more photos in the browser's database, which may take gigabytes, one is told. */
const MANY_PHOTOS = 50

const panes = { models: byId("models"), graph: byId("graph"), features: byId("features") }
const inspector = new Inspector(panes.features, { go, choose, take: takePhotos, remove: removePhoto, refresh: () => show(place()) })

/** @type {Model | null} */ let model = null
/** @type {GraphView | null} */ let graph = null
/** @type {ReturnType<typeof showChooser> | null} */ let chooser = null
let requested = "", laidOut = ""
let moves = 0
let stop = new AbortController()
/** The measurement under way. @type {AbortController | null} */ let measuring = null

/** @param {Iterable<File>} files */
async function takePhotos(files) {
  const { names, refused } = await take(files)
  const many = ownPhotos().length
  if (many > MANY_PHOTOS) refused.push(`${many} photos are kept in this browser: remove those that you no longer need.`)
  notify(refused.join(" "))
  if (names.length) go({ p: names[0] })
}

/** @param {import("./photo.js").Photo} photo */
async function removePhoto(photo) {
  await forget(photo)
  const { p, p2 } = place()
  if (isMissing(p) || isMissing(p2)) go({ ...(isMissing(p) ? { p: null } : {}), ...(isMissing(p2) ? { p2: null } : {}) })
  else show(place())
}

/** Show a notice over the page until the next one. @param {string} text empty for none */
function notify(text) {
  const line = byId("notice")
  line.replaceChildren(text, h("button", { type: "button", class: "quiet", onclick: () => notify("") }, "Close"))
  line.hidden = !text
}

/** @param {import("./place.js").Place} now */
async function show(now) {
  let mine = ++moves
  showTabs(now)
  if (!now.m) return showStart()
  document.body.classList.add("inside")
  const wanted = `${now.m}\n${now.w ?? ""}`
  if (wanted !== requested) {
    requested = wanted
    if (!(await load(now))) return
    mine = ++moves
  }
  if (!model || requested !== wanted) return
  const current = place()
  if (!current.n && model.firstNode) return go({ n: model.firstNode }, true)
  showWhere([model.name, current.n].filter(Boolean).join(" / "))
  const shown = model
  await Promise.all([showGraph(shown), inspector.update(shown, current)])
  if (mine !== moves || !shown.takesPhotos) return
  // After the output itself, so that it comes first. A large model runs only once that is wanted.
  const photo = inspector.runs(shown) ? await photoOf(current.p).catch(() => null) : null
  if (mine === moves) graph?.picture(photo, current.i ?? "mean", sizeQuery(current))
}

/** Stop what is under way for what was shown. */
function leave() {
  stop.abort()
  stopMeasuring()
  inspector.stop()
  graph?.pictures.show(null)
}

/** @param {boolean} [lost] whether the keyboard's focus is to go there */
function showStart(lost = holdsFocus()) {
  leave()
  model = graph = chooser = null
  requested = laidOut = ""
  document.body.classList.remove("inside")
  showWhere("")
  panes.features.replaceChildren()
  if (!panes.graph.querySelector(".welcome")) panes.graph.replaceChildren()
  showCatalogue(panes.models, showWelcome(lost)).catch((error) => {
    if (!requested) panes.models.replaceChildren(failure(error, ["Try again", () => show(place())]))
  })
}

/** @param {boolean} lost whether the keyboard's focus is to go there */
async function showWelcome(lost) {
  const mine = (stop = new AbortController())
  try {
    const { element, picture } = await welcome(place(), { go, take: takePhotos, remove: removePhoto })
    if (mine.signal.aborted) return
    keepFocus(panes.graph, () => panes.graph.replaceChildren(element))
    if (lost && document.activeElement === document.body) focusHeading(panes.graph)
    await picture(mine.signal)
  } catch {
    // The list of models says why.
  }
}

/** Load the model of a place; false where that failed or something else was chosen meanwhile. @param {import("./place.js").Place} now */
async function load(now) {
  const lost = holdsFocus()
  leave()
  notify("")
  const mine = (stop = new AbortController())
  const fresh = model?.name !== now.m
  const waiting = progress(`Loading ${now.m}`, () => { location.hash = link(kept(now)) }, "its graph is being traced")
  if (fresh) {
    model = graph = chooser = null
    showWhere(now.m)
    document.body.dataset.tab = "models" // a narrow screen shows what is waited for, or what went wrong
    panes.models.replaceChildren(waiting)
    panes.graph.replaceChildren()
    panes.features.replaceChildren()
  }
  laidOut = ""
  try {
    model = await loadModel(now.m, now.w, mine.signal)
  } catch (error) {
    if (mine.signal.aborted) return false
    if (error instanceof Problem && error.status === 404) {
      relist()
      notify(error.message)
      showStart(lost || holdsFocus())
      return false
    }
    requested = ""
    const back = h("p", {}, h("a", { href: link(kept(now)) }, "All models"))
    panes.models.replaceChildren(failure(error, ...retries(error, () => show(place()), () => go({ w: "random" }))), back)
    if (lost) focusHeading(panes.models)
    return false
  } finally {
    waiting.remove()
  }
  chooser = showChooser(panes.models, model, {
    weights: (w) => go({ w }), choose: (path) => choose(path), toggle, search: (wanted) => graph?.search(wanted),
  })
  graph ??= new GraphView(panes.graph, {
    choose: stepTo, toggle, openAll: () => go({ o: ALL }, true), closeAll: () => go({ o: "" }, true), colour: (c) => go({ c: c || null }, true),
    see: () => go({ t: "features" }),
    picture: (i) => go({ i: i === "mean" ? null : i }, true),
  })
  showTabs(place())
  if (lost) focusHeading(panes.models)
  return true
}

/** Whether the keyboard's focus is in a pane, whose contents are about to be replaced. */
const holdsFocus = () => Object.values(panes).some((pane) => pane.contains(document.activeElement))

/** Have the keyboard go on, and a screen reader begin to read, at what is shown now. @param {HTMLElement} pane */
function focusHeading(pane) {
  /** @type {HTMLElement | null} */ (pane.querySelector("h1, h2"))?.focus()
}

/** Choose a node without opening the module that it is in. @param {string} path @param {boolean} [replace] without an entry in the history */
const stepTo = (path, replace) => go({ n: path, ch: null, at: null }, replace)

/** Choose a node, and open the modules that it is in. @param {string} path */
function choose(path) {
  if (!model) return
  const node = model.resolve(path)
  const open = openModules(model)
  const above = node && path === node.name && place().o !== ALL ? modulesAbove(path).filter((module) => !open.has(module)) : []
  go({ n: path, ch: null, at: null, ...(above.length ? { o: [...open, ...above].join(",") } : {}) })
}

/** Expand or collapse a module; those inside a collapsed one collapse as well. @param {string} path */
function toggle(path) {
  if (!model) return
  const open = openModules(model)
  if (!open.delete(path)) open.add(path)
  go({ o: [...open].filter((other) => open.has(path) || !other.startsWith(`${path}.`)).join(",") }, true)
}

/** @param {Model} shown */
function openModules(shown) {
  const { o } = place()
  if (o === undefined) return shown.firstOpen
  if (o === ALL) return new Set(shown.nodes.flatMap((node) => modulesAbove(node.name)))
  return new Set(o.split(",").filter(Boolean))
}

/** @param {Model} shown */
async function showGraph(shown) {
  const { o } = place()
  const view = graph
  if (!view) return
  const opened = o === ALL ? null : [...openModules(shown)].sort().join(",")
  const wanted = `${shown.name}\n${shown.weights}\n${opened}`
  if (wanted !== laidOut) {
    const fresh = !laidOut.startsWith(`${shown.name}\n`)
    const before = laidOut
    laidOut = wanted
    view.wait(true)
    const query = { format: "layout", weights: shown.weights, ...(opened === null ? {} : { open: opened }) }
    try {
      const layout = await askJson(modelPath(shown.name, "/graph", query), { signal: stop.signal })
      if (laidOut !== wanted) return
      view.show(shown, layout, fresh)
    } catch (error) {
      if (stop.signal.aborted || laidOut !== wanted) return
      laidOut = before
      view.wait(false)
      // The tree stays as open as the graph is.
      chooser?.update(null, chosenOf(shown))
      const again = () => show(place())
      view.say(reason(error), ["Try again", again])
      onceBack(error, view.note, again)
      return
    }
  }
  // Another node may have been chosen while the layout came; the tree waits for it as well.
  const chosen = chosenOf(shown)
  chooser?.update(view.waits ? null : openModules(shown), chosen)
  view.choose(chosen)
  await colour(view, shown, place().c ?? "")
}

/** The name of the chosen node. @param {Model} shown */
const chosenOf = (shown) => shown.resolve(place().n)?.name ?? null

/** @param {GraphView} view @param {Model} shown @param {string} by */
async function colour(view, shown, by) {
  if (by !== "time" || view.measured) {
    stopMeasuring()
    view.say("")
    return view.colour(by)
  }
  view.say("Measuring each node on a photograph…", ["Cancel", () => go({ c: null }, true)])
  if (measuring) return
  const mine = (measuring = new AbortController())
  try {
    view.measured = await measured(shown, mine.signal)
    view.say("")
    view.colour(by)
  } catch (error) {
    if (!mine.signal.aborted) view.say(reason(error))
  } finally {
    if (measuring === mine) measuring = null
  }
}

function stopMeasuring() {
  measuring?.abort()
  measuring = null
}

onMove(show)
watchDrops(takePhotos)
watchDivider()
watchKeys()
// Not in the graph itself, which its listener would keep after another model is chosen.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => graph?.repaint())
for (const button of document.querySelectorAll("[data-skip]"))
  button.addEventListener("click", () => {
    /** @type {HTMLElement | null} */
    const first = byId(button.getAttribute("data-skip") ?? "").querySelector("canvas[tabindex='0'], .name[tabindex='0'], button")
    first?.focus()
  })
if (storedKey()) showKeyButton()
await restorePhotos()
show(place())

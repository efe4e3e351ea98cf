// Elements, made in one expression.

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

// The worker, as promises.

const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" })

/** @type {Map<number, {resolve: (result: any) => void, reject: (error: Error) => void}>} */
const waiting = new Map()
let last = 0

worker.onmessage = (/** @type {MessageEvent} */ event) => {
  const { number, result, error } = event.data
  const asker = waiting.get(number)
  waiting.delete(number)
  if (error) asker?.reject(new Error(error))
  else asker?.resolve(result)
}

/**
 * Have the worker do one of its operations.
 * @param {string} operation
 * @param {Record<string, any>} message
 * @param {Transferable[]} [transfer]
 * @returns {Promise<any>}
 */
export function reduce(operation, message, transfer = []) {
  return new Promise((resolve, reject) => {
    waiting.set(++last, { resolve, reject })
    worker.postMessage({ number: last, operation, ...message }, transfer)
  })
}

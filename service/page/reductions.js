// The worker, as promises. It does one job at a time, and those that wait can still be taken back.

/** Begun with the first job, and anew after a failure. @type {Worker | null} */
let worker = null

/** @typedef {{message: Record<string, any>, transfer: Transferable[], topic: string | null, resolve: (result: any) => void, reject: (error: Error) => void}} Job */

/** @type {Job[]} */
const waiting = []
/** @type {Job | null} */
let running = null

/** Called once a worker has failed, and what it held is lost. @type {() => void} */
let lost = () => {}
/** @param {() => void} listener */
export const onLoss = (listener) => { lost = listener }

function begin() {
  const begun = new Worker(new URL("./worker.js", import.meta.url), { type: "module" })
  begun.onmessage = ({ data: { result, error } }) => {
    if (error === undefined) running?.resolve(result)
    else running?.reject(new Error(error))
    next()
  }
  // Its files did not come, or it had too little memory.
  begun.onerror = begun.onmessageerror = () => {
    begun.terminate()
    worker = null
    lost()
    for (const job of [running, ...waiting.splice(0)]) job?.reject(new Error("The part of the page that computes maps has failed."))
    running = null
  }
  return begun
}

function next() {
  running = waiting.shift() ?? null
  if (running) (worker ??= begin()).postMessage(running.message, running.transfer)
}

/**
 * Have the worker do one of its operations.
 * @param {string} operation
 * @param {Record<string, any>} message
 * @param {{transfer?: Transferable[], topic?: string | null}} [options] a job takes back those of its topic that still wait: their promises are
 *   rejected with an AbortError
 * @returns {Promise<any>}
 */
export function reduce(operation, message, { transfer = [], topic = null } = {}) {
  return new Promise((resolve, reject) => {
    const stale = topic === null ? -1 : waiting.findIndex((job) => job.topic === topic)
    if (stale >= 0) waiting.splice(stale, 1)[0].reject(new DOMException(`another ${operation} is wanted`, "AbortError"))
    waiting.push({ message: { operation, ...message }, transfer, topic, resolve, reject })
    if (!running) next()
  })
}

/** Whether a promise was rejected because its result is no longer wanted. @param {unknown} error */
export const isStale = (error) => error instanceof DOMException && error.name === "AbortError"

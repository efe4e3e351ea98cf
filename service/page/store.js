// One's own photos in this browser's database, so that they survive a reload.

/** @typedef {{file: Blob, title: string, small?: ImageData | null, time?: number}} Stored */

const STORE = "photos"

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result)
  request.onerror = () => reject(request.error)
})

/** @param {IDBTransactionMode} mode */
async function photos(mode) {
  const request = indexedDB.open("fxserve", 1)
  request.onupgradeneeded = () => request.result.createObjectStore(STORE)
  return (await done(request)).transaction(STORE, mode).objectStore(STORE)
}

/**
 * The photos by name, the oldest first; none where the browser keeps nothing, as in private windows.
 * @returns {Promise<Array<[string, Stored]>>}
 */
export async function stored() {
  try {
    const found = await photos("readonly")
    const [names, values] = await Promise.all([done(found.getAllKeys()), done(found.getAll())])
    return values.map((value, i) => /** @type {[string, Stored]} */ ([String(names[i]), value])).sort(([, a], [, b]) => (a.time ?? 0) - (b.time ?? 0))
  } catch {
    return []
  }
}

/** @param {string} name @param {Stored} photo */
export async function store(name, photo) {
  await photos("readwrite").then((found) => done(found.put({ time: Date.now(), ...photo }, name))).catch(() => null)
}

/** @param {string} name */
export async function unstore(name) {
  await photos("readwrite").then((found) => done(found.delete(name))).catch(() => null)
}

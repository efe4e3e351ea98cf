// Requests to the service, with the API key; its problems are thrown as errors.

import { askForKey, storedKey } from "./key.js"

/** A problem that the service answered, or that it gave no answer. */
export class Problem extends Error {
  /**
   * @param {string} title
   * @param {string} detail
   * @param {number} status 0 where there was no answer
   * @param {string} type
   * @param {number} after how many seconds later the service expects to do it; 0 where it says nothing of that
   */
  constructor(title, detail, status, type = "", after = 0) {
    super(detail)
    this.title = title
    this.status = status
    this.type = type
    this.after = after
  }
}

/**
 * Send a request; where the service requires another key, ask for it and send the request again.
 * @param {string} path without a slash in front, so that the service may live under any prefix
 * @param {RequestInit} [options]
 * @returns {Promise<Response>}
 */
export async function ask(path, options = {}) {
  for (;;) {
    const key = storedKey()
    const headers = new Headers(options.headers)
    if (key) headers.set("Authorization", `Bearer ${key}`)
    const answer = await fetch(path, { ...options, headers }).catch((error) => {
      if (error.name === "AbortError") throw error
      throw new Problem("No answer", "The server does not answer. Is it still running?", 0)
    })
    if (answer.ok) return answer
    const problem = await asProblem(answer)
    if (answer.status !== 401) throw problem
    if (storedKey() === key) await askForKey(key ? problem.message : "")
  }
}

/** @param {Response} answer */
async function asProblem(answer) {
  try {
    const found = await answer.json()
    return new Problem(found.title ?? "Error", found.detail ?? answer.statusText, answer.status, found.type, Number(answer.headers.get("Retry-After")))
  } catch {
    return new Problem("Error", `The server answered ${answer.status} ${answer.statusText}.`, answer.status)
  }
}

/** @param {string} path @param {RequestInit} [options] @returns {Promise<any>} */
export async function askJson(path, options) {
  return (await ask(path, options)).json()
}

/**
 * A path's last part and a query, escaped.
 * @param {string} model
 * @param {string} [rest]
 * @param {Record<string, string>} [query]
 */
export function modelPath(model, rest = "", query = {}) {
  const text = new URLSearchParams(query).toString()
  return `v1/models/${encodeURIComponent(model)}${rest}${text ? `?${text}` : ""}`
}

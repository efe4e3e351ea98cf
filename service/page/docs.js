// The reference: Swagger UI over this service's own OpenAPI document, with the key of this tab.

import { storedKey } from "./key.js"

const key = storedKey()
const ui = /** @type {any} */ (globalThis).SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#reference",
  deepLinking: true,
  validatorUrl: null,
  onComplete: () => key && ui.preauthorizeApiKey("key", key),
})

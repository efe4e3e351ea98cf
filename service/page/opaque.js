// A picture without its transparency: models see the colours that were saved under it.

/**
 * The colours of a picture, as the service decodes them. A 2D canvas would lose those under full transparency, WebGL keeps them.
 * @param {Blob} data @param {ImageBitmap} bitmap of it
 * @returns {Promise<ImageBitmap>} the same where nothing is transparent, or where the colours cannot be had
 */
export async function opaque(data, bitmap) {
  const [first, second] = new Uint8Array(await data.slice(0, 2).arrayBuffer())
  if (first === 0xff && second === 0xd8) return bitmap // a JPEG has no transparency
  const source = await createImageBitmap(data, { premultiplyAlpha: "none" })
  const { width, height } = source
  const gl = new OffscreenCanvas(1, 1).getContext("webgl")
  if (!gl || Math.max(width, height) > gl.getParameter(gl.MAX_TEXTURE_SIZE)) return bitmap
  const pixels = new Uint8Array(4 * width * height)
  gl.bindTexture(gl.TEXTURE_2D, gl.createTexture())
  gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA, gl.RGBA, gl.UNSIGNED_BYTE, source)
  gl.bindFramebuffer(gl.FRAMEBUFFER, gl.createFramebuffer())
  gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.COLOR_ATTACHMENT0, gl.TEXTURE_2D, gl.getParameter(gl.TEXTURE_BINDING_2D), 0)
  gl.readPixels(0, 0, width, height, gl.RGBA, gl.UNSIGNED_BYTE, pixels)
  const failed = gl.getError() !== gl.NO_ERROR
  gl.getExtension("WEBGL_lose_context")?.loseContext() // browsers have few, and free them late
  source.close()
  if (failed) return bitmap
  let clear = false
  for (let i = 3; i < pixels.length; i += 4) {
    clear ||= pixels[i] < 255
    pixels[i] = 255
  }
  return clear ? createImageBitmap(new ImageData(new Uint8ClampedArray(pixels.buffer), width)) : bitmap
}

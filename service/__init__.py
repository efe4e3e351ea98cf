"""The HTTP service on top of fxcore."""

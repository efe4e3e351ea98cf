"""The HTTP service around fxcore."""

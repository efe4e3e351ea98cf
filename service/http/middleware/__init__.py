"""Pure ASGI middleware, because ``BaseHTTPMiddleware`` hides disconnects from the routes."""

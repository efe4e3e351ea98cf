"""ASGI middleware. Plain, since ``BaseHTTPMiddleware`` hides disconnects from the routes."""

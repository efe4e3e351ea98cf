"""Queries and JSON bodies of ``/v1``, with the examples of the OpenAPI document."""

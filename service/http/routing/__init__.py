"""Declarations of routes, and strict parsing of their parameters."""

"""Parsing of request bodies: content types, multipart files, images as text, and regions."""

"""Bodies of requests: their content types, multipart files, images as text, and regions."""

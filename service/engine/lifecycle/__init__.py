"""The life of extractors: known, built, lent to requests, and evicted under one memory budget."""

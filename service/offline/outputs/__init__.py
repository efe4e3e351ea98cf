"""The output folder of a run: its shards, its index and its spec, and the local folder they are written in."""

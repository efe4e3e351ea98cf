"""``fxserve extract``: extract the features of whole folders of images into shards, on disk or in a bucket. Resumable.

An output folder holds

- ``spec.json``: the extractor's spec, its graph's fingerprint, and the outputs' names, shapes and dtypes;
- ``shard-000000.…``: rows of features and the paths of their images;
- ``index.sqlite``: the table ``images``, path → shard and row. A shard counts only once it is indexed, so that a run
  can be killed at any time and resumed;
- ``errors.jsonl``: the images that could not be read, with reasons.
"""

from service.offline.run import Job, Summary, extract

__all__ = ["Job", "Summary", "extract"]

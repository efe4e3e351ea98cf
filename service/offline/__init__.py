"""``fxserve extract``: features of more images than a request holds, in shards on the disk or in a bucket; resumable.

An output folder holds

- ``spec.json``: what was asked for, the graph's fingerprint, and the outputs' names, shapes and dtypes;
- ``shard-000000.…``: rows of features and the paths that they are of;
- ``index.sqlite``: the table ``images``, path → shard and row. A shard counts once it is in there, so that a run that
  is killed at any moment can be taken up again;
- ``errors.jsonl``: the images that could not be read, each with the reason.
"""

from service.offline.run import Job, Summary, extract

__all__ = ["Job", "Summary", "extract"]

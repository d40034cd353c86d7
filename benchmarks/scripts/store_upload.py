"""256 MB uploaded to a real S3 server (moto's): store_upload.py holdfast|fsspec; prints a JSON object.

holdfast: one rank's file from memory with its digests, its record, and the commit. fsspec: `put` of a file in memory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

import fsspec

from holdfast.train.snapshots import changes
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.remote import location_of
from tests.support.object_store import BUCKET, ObjectStore

SIZE_BYTES = 256 << 20


def main(ours: bool) -> None:
    store = ObjectStore()
    try:
        os.environ.update(store.environ())
        data = bytearray(os.urandom(SIZE_BYTES))
        root = location_of(f"s3://{BUCKET}/run")
        (root / "warm").put(b"warm")  # type: ignore[union-attr]
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.write(data)
            file.flush()
            fs = fsspec.filesystem("s3")
            fs.pipe_file(f"s3://{BUCKET}/warm", b"warm")
            request = SaveRequest(str(root), 1, 1, 0, 1)
            began = time.perf_counter()
            if ours:
                changes.write_rank(request, data)
                changes.commit(request)
            else:
                fs.put(file.name, f"s3://{BUCKET}/plain")
            print(json.dumps({"upload": time.perf_counter() - began}))
    finally:
        store.close()


if __name__ == "__main__":
    main(sys.argv[1] == "holdfast")

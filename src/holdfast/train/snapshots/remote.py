"""Objects under a URL: reached by fsspec, as `Location` beside pathlib's Path. Knows nothing of snapshots.

The store is reached by fsspec and the driver that the URL needs (s3fs, gcsfs, adlfs: the extra `remote`). They are
imported on the first use of a URL, in the worker and in the saver's own process: the saver has the slot in its memory,
and another process would need its own copy and its own supervision. The saver's Python sees the standard library alone
(`-S`); the worker sends it the folders of its packages and its environment (`adopt`).

Options and credentials come from the environment and from the files of fsspec and of the driver, never from a URL or
an argument: requests to save are written into memory slots, and messages into logs. `redacted` takes secrets out of a
driver's messages.

Every request except `leave` is repeated with growing pauses, for RETRY_S seconds in all. Errors are OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from holdfast.protocol.errors import MissingPackageError, SnapshotURLError

RETRY_S = 120.0
"""A request that fails is repeated for this time."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.2, 10.0
"""Pause before a repetition; it doubles from the first to the second (s)."""
PART_BYTES = 16 << 20
"""Smallest part of a multipart upload. S3 takes at least 5 MiB, and at most PARTS_MAX parts."""
PARTS_MAX = 10_000
PARTS_AT_ONCE = 8
"""Parts that are uploaded in parallel. Each has a copy of its bytes in memory."""
STORE_POLL_S = 0.5
"""Pause between two listings (s): each is a request that costs money."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#@\s:]+)((?:/[^/?#\s]+)*)/*")
_LOST_SLASH = re.compile(r"(s3a?|gcs|gs|az|abfss?|file):/[^/]")
"""A URL that was made a Path: pathlib turns `s3://bucket` into `s3:/bucket`."""
_SECRET = re.compile(r"key|secret|token|passw|signature|credential|connection_string|sas", re.IGNORECASE)
_UNFIT = ("memory", "http", "https", "data")
"""Protocols of fsspec that other processes cannot read, or that cannot be written."""
_MISSING_KEYS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound")
"""Names of the drivers' errors for missing credentials."""
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, NotImplementedError, ValueError, TypeError, ImportError)
"""Errors for which a repetition does not help."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, order=True)
class RemotePath:
    """A name in an object store, used like a pathlib.Path. Methods raise OSError."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0])

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, begin: int, end: int) -> bytes:
        """These bytes of the object, as far as it has them."""
        found: bytes = self._ask(lambda fs: fs.cat_file(self.url, start=begin, end=end))
        return found

    def size(self) -> int:
        """The object's size in bytes, asked for by its name: a listing may be old."""
        return int(self._ask(lambda fs: fs.info(self.url))["size"])

    def sizes(self) -> dict[str, int]:
        """The names below this one and their sizes in bytes, as the store lists them; the size of a prefix is 0. Empty:
        there are none."""
        try:
            found = self._ask(lambda fs: fs.ls(self.url, detail=True))
        except FileNotFoundError:
            return {}
        sizes = {each["name"].rstrip("/").rpartition("/")[2]: int(each.get("size") or 0) for each in found}
        return {name: size for name, size in sizes.items() if name}

    # --- writing ------------------------------------------------------------------------------------------------------

    def put(self, data: bytes) -> None:
        """Make or replace a small object."""
        self._ask(lambda fs: fs.pipe_file(self.url, data))

    def create(self, data: bytes) -> bool:
        """Make a small object unless it exists, by one conditional put, where the store has that. Returns whether the
        object has this content now; so `data` must differ from that of any other writer."""
        with contextlib.suppress(FileExistsError):
            self._ask(lambda fs: fs.pipe_file(self.url, data, mode="create"))
        # Read back: the answer to our own put may have been lost, and a store may ignore the condition.
        return self.read(0, len(data) + 1) == data

    def leave(self, data: bytes) -> None:
        """Make a small object unless it exists, by one request that is not repeated: for a process that is ending."""
        self._ask(lambda fs: fs.pipe_file(self.url, data, mode="create"), retry_s=0.0)

    def upload(self, data: memoryview) -> None:
        """Make an object of any size. The parts of a failed upload are removed, as far as the store allows."""
        fs = filesystem(self.url)
        if len(data) < 2 * PART_BYTES:
            self.put(bytes(data))
        elif hasattr(fs, "call_s3"):
            self._upload_parts(fs, data)
        else:
            self._ask(lambda fs: _stream(fs, self.url, data))

    def _upload_parts(self, fs: Any, data: memoryview) -> None:
        """S3's multipart upload, with its parts in parallel."""
        bucket, key, _ = fs.split_path(self.url)
        part_bytes = max(PART_BYTES, -(-len(data) // PARTS_MAX))
        begun = self._ask(lambda fs: fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key))
        upload = {"Bucket": bucket, "Key": key, "UploadId": begun["UploadId"]}

        def send(number: int) -> dict[str, Any]:
            body = bytes(data[number * part_bytes : (number + 1) * part_bytes])
            done = self._ask(lambda fs: fs.call_s3("upload_part", PartNumber=number + 1, Body=body, **upload))
            return {"PartNumber": number + 1, "ETag": done["ETag"]}

        pool = ThreadPoolExecutor(PARTS_AT_ONCE, "holdfast-upload")
        try:
            parts = list(pool.map(send, range(-(-len(data) // part_bytes))))
            self._complete(upload, parts, len(data))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            with contextlib.suppress(Exception):
                fs.call_s3("abort_multipart_upload", **upload)
            raise
        finally:
            pool.shutdown()

    def _complete(self, upload: dict[str, Any], parts: list[dict[str, Any]], size_bytes: int) -> None:
        """Make the object of its parts. OSError."""
        try:
            self._ask(lambda fs: fs.call_s3("complete_multipart_upload", MultipartUpload={"Parts": parts}, **upload))
        except OSError:
            # If the answer to the first request was lost, the repeated one fails: the store does not know the upload
            # any more. The object shows whether it was made.
            with contextlib.suppress(OSError):
                if self.size() == size_bytes:
                    return
            raise

    def delete(self) -> None:
        """Delete the object; no error when there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda fs: fs.rm_file(self.url))

    def abort_uploads(self) -> None:
        """Remove the parts of unfinished uploads below this name. S3 keeps them, and charges for them, until they are
        removed; Google's and Azure's stores drop them by themselves after a week, and cannot list them."""
        fs = filesystem(self.url)
        if not hasattr(fs, "call_s3"):
            return
        bucket, prefix, _ = fs.split_path(self.url)
        query = {"Bucket": bucket, "Prefix": f"{prefix}/"}
        while True:
            page = self._ask(lambda fs, query=query: fs.call_s3("list_multipart_uploads", **query))  # type: ignore[misc]
            for each in page.get("Uploads") or []:
                one = {"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]}
                with contextlib.suppress(FileNotFoundError):
                    self._ask(lambda fs, one=one: fs.call_s3("abort_multipart_upload", **one))  # type: ignore[misc]
            if not page.get("IsTruncated"):
                return
            query |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _ask(self, request: Callable[[Any], _Answer], retry_s: float | None = None) -> _Answer:
        """The answer to a request, which is repeated while that may help, by default for RETRY_S. OSError."""
        give_up = time.monotonic() + (RETRY_S if retry_s is None else retry_s)
        fs, pause_s = filesystem(self.url), PAUSE_S_MIN
        while True:
            try:
                fs.invalidate_cache()
                return request(fs)
            except Exception as error:  # noqa: BLE001 - each driver has its own kinds
                final = _is_final(error) or time.monotonic() + pause_s > give_up
                if final:
                    # The driver's error is not the cause of ours: its text may hold secrets, and would be in the
                    # traceback.
                    raise _os_error(error, self.url) from None
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSE_S_MAX)


Location = Path | RemotePath
"""The path or the URL of a snapshot folder, a snapshot or a file of it: on a file system or in an object store."""


def location_of(folder: str | os.PathLike[str] | RemotePath) -> Location:
    """The location with this path or URL. Raises SnapshotURLError."""
    if isinstance(folder, RemotePath):
        return folder
    text = os.fspath(folder)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    if "://" not in text:
        if _LOST_SLASH.match(text):
            raise SnapshotURLError(f"{redacted(text)} has lost a slash: give the URL as a text, not as a Path")
        return Path(text)
    found = _URL.fullmatch(text)
    if found is None or found[1] in _UNFIT or "::" in text:
        why = "write protocol://bucket/folder"
        if found is not None:
            why = f"{found[1]}: cannot hold snapshots"
        elif "@" in text or "?" in text:
            why = (
                "no user, password or query belongs into it: credentials come from the store's own variables and files"
            )
        raise SnapshotURLError(f"the snapshot URL {redacted(text)} is not valid: {why}")

    return RemotePath(f"{found[1]}://{found[2]}{found[3]}")


def absolute(folder: str | os.PathLike[str] | RemotePath) -> Location:
    """The location with this path or URL; a path is made absolute. Raises SnapshotURLError."""
    location = location_of(folder)
    return location if isinstance(location, RemotePath) else Path(os.path.abspath(location))


def filesystem(url: str) -> Any:
    """The fsspec object for the URL; fsspec keeps one for each store. Raises MissingPackageError, SnapshotURLError,
    OSError."""
    protocol = url.partition("://")[0]
    try:
        import fsspec

        options: dict[str, Any] = {}
        if protocol in ("s3", "s3a"):
            # Only `_ask` repeats: repetitions of three layers (botocore, s3fs, ours) would multiply.
            limits = {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 1}}
            options["config_kwargs"] = {**limits, **fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})}
        fs = fsspec.filesystem(protocol, use_listings_cache=False, **options)
    except ImportError as error:
        raise MissingPackageError(f"{url} needs a package ({error}): pip install 'holdfast[remote]'") from None
    except ValueError as error:
        raise SnapshotURLError(f"{url}: {redacted(str(error))}") from None
    except Exception as error:  # noqa: BLE001 - a driver that finds no credentials, and the like
        raise _os_error(error, url) from None
    if hasattr(fs, "call_s3"):
        fs.retries = 1
    return fs


def adopt(packages: Sequence[str], environ: Mapping[str, str]) -> None:
    """Let this process import packages from the worker's folders, and use its credentials; only the saver does this.
    Our own packages and those of the standard library come first."""
    sys.path.extend(each for each in packages if os.path.isabs(each) and each not in sys.path)
    os.environ.update(environ)


def redacted(text: str) -> str:
    """The text without users and passwords in URLs, without queries, which may be signed, and without values of
    variables that look secret."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name):
            text = text.replace(value, "…")
    return re.sub(r"\?[^\s'\"<>]+", "?…", re.sub(r"://[^/\s]*@", "://…@", text))


def _stream(fs: Any, url: str, data: memoryview) -> None:
    """Upload through fsspec's file, which becomes visible when it is closed."""
    file = fs.open(url, "wb", block_size=PART_BYTES)
    try:
        for begin in range(0, len(data), PART_BYTES):
            file.write(bytes(data[begin : begin + PART_BYTES]))
    except BaseException:
        file.closed = True  # else its end would make half an object visible
        with contextlib.suppress(Exception):
            file.discard()
        raise
    file.close()


def _is_final(error: Exception) -> bool:
    """Whether a repetition of the request does not help."""
    return isinstance(error, _FINAL) or type(error).__name__ in _MISSING_KEYS or _refused(error)


def _refused(error: Exception) -> bool:
    """Whether a conditional put was refused because the object exists: the drivers for S3 and Google have no class for
    that."""
    return "PreconditionFailed" in repr(error) or "pre-conditions you specified did not hold" in str(error)


def _os_error(error: Exception, url: str) -> OSError:
    """The OSError that says the same as a driver's error. Of the numbers that mean damage (disk.DAMAGE) it uses ENOENT
    only."""
    number = errno.EHOSTUNREACH
    if isinstance(error, FileNotFoundError):
        number = errno.ENOENT
    elif isinstance(error, FileExistsError) or _refused(error):
        number = errno.EEXIST
    elif isinstance(error, PermissionError) or type(error).__name__ in _MISSING_KEYS:
        number = errno.EACCES
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EINVAL):
        number = error.errno
    text = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
    return OSError(number, redacted(text.splitlines()[0]), url)

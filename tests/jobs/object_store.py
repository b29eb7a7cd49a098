"""An object store on this machine: as much of S3's protocol as readers need, over a folder."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ["object_store"]

_TIME = "2026-01-02T03:04:05.000Z"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: bytes, head: dict[str, str] | None = None, *, size: int | None = None) -> None:
        self.send_response(status)
        for name, value in (head or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        if not key:
            self._list(self.root / bucket, query.get("prefix", ""), query.get("delimiter", ""))
            return
        path = self.root / bucket / key
        if not path.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", {"Content-Type": "application/xml"})
            return
        data = path.read_bytes()
        head = {
            "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT",
            "ETag": f'"{md5(data).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self._answer(200, data, head)
            return
        begin, end = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
        head["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
        self._answer(206, data[begin : end + 1], head)

    def _list(self, bucket: Path, prefix: str, delimiter: str) -> None:
        keys = sorted(path.relative_to(bucket).as_posix() for path in bucket.rglob("*") if path.is_file())
        found, folders = [], set()
        for key in keys:
            if key.startswith(prefix):
                inside, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                if mark:
                    folders.add(prefix + inside + mark)
                else:
                    found.append((key, (bucket / key).stat().st_size))
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_TIME}</LastModified><Size>{size}</Size></Contents>"
            for key, size in found
        )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
        body = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<KeyCount>{len(found) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>{contents}{common}"
            "</ListBucketResult>"
        )
        self._answer(200, body.encode(), {"Content-Type": "application/xml"})


@contextmanager
def object_store(root: Path) -> Iterator[str]:
    """Serves the buckets of ``root`` (its folders); yields what goes behind an URL's question mark."""
    handler = type("Handler", (_Handler,), {"root": root})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"scheme=http&endpoint_override=127.0.0.1:{server.server_port}&region=us-east-1"
        finally:
            server.shutdown()
            thread.join()

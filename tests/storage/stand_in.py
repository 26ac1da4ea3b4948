"""Serves one directory as S3, Google's XML interface, the Hugging Face hub and a plain web server.

    python3 tests/storage/stand_in.py DIRECTORY [--key ID:SECRET] [--token TOKEN] [--delay SECONDS] [--deny-list] [--replace FILE]

Prints its port. Paths:  /DIR/KEY and /DIR?list-type=2   S3, path style: DIR is the bucket
                         /web/PATH                        files with ranges, directories as pages
                         /api/models/O/M/..., /O/M/resolve/COMMIT/PATH   the hub: O/M is a directory
                         /_control                        PUT a JSON of faults; GET counts and the requests' headers

With --key every S3 request must be signed with it (AWS Signature Version 4). Faults are
{"fault": NAME, "times": N, "match": TEXT}: the next N requests whose target contains TEXT go wrong:
500, slow-down, reset, short, error-200, expired-token, clock-skew, region, stall.
Nothing here is from another project: it is written to the letter of the interfaces' documentation.
"""
import argparse
import datetime
import email.utils
import hashlib
import hmac
import html
import http.server
import json
import os
import pathlib
import re
import socket
import struct
import sys
import threading
import time
import urllib.parse
from xml.sax.saxutils import escape

COMMIT = "c0ffee" * 6 + "beef"
quote = urllib.parse.quote


class State:
    def __init__(self, options):
        self.root = pathlib.Path(options.directory).resolve()
        self.options = options
        self.lock = threading.Lock()
        self.faults = []
        self.requests = []
        self.open_now = self.most_open = 0

    def next_fault(self, target):
        with self.lock:
            for fault in self.faults:
                if fault["times"] > 0 and fault.get("match", "") in target:
                    fault["times"] -= 1
                    return fault["fault"]
        return None


def etag_of(path):
    s = path.stat()
    return '"%s"' % hashlib.md5(f"{s.st_ino} {s.st_size} {s.st_mtime_ns}".encode()).hexdigest()


def signature(secret, request, scope, names):
    """Returns the expected signature of a request, from its own signed headers and the scope that it states."""
    path, _, query = request.path.partition("?")
    pairs = sorted(p.split("=", 1) if "=" in p else [p, ""] for p in query.split("&") if p)
    headers = "".join(f"{n}:{' '.join(request.headers.get(n, '').split())}\n" for n in names.split(";"))
    canonical = "\n".join([request.command, path, "&".join(f"{k}={v}" for k, v in pairs), headers, names,
                           request.headers.get("x-amz-content-sha256", "")])
    text = "\n".join(["AWS4-HMAC-SHA256", request.headers.get("x-amz-date", ""), scope,
                      hashlib.sha256(canonical.encode()).hexdigest()])
    key = ("AWS4" + secret).encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    # ---- replies

    def reply(self, status, body=b"", headers=None, length=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def xml_error(self, status, code, message="", headers=None, more=""):
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{escape(message)}</Message>{more}</Error>'
        self.reply(status, body.encode(), {"Content-Type": "application/xml", **(headers or {})})

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def file(self, path, short=False, headers=None):
        """Replies with a file or the requested range of it, pinned by If-Match."""
        size, etag = path.stat().st_size, etag_of(path)
        headers = {"ETag": etag, "Last-Modified": email.utils.formatdate(path.stat().st_mtime, usegmt=True),
                   "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream", **(headers or {})}
        if self.headers.get("If-Match", etag) != etag:
            return self.xml_error(412, "PreconditionFailed")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted and int(wanted[1]) >= size:
            return self.xml_error(416, "InvalidRange", headers={"Content-Range": f"bytes */{size}"})
        begin, end = (int(wanted[1]), min(int(wanted[2]) + 1, size)) if wanted else (0, size)
        if wanted:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        with open(path, "rb") as f:
            f.seek(begin)
            body = f.read(end - begin)
        if self.server.state.options.replace == str(path):  # by the same bytes, later
            os.utime(path)
        self.reply(206 if wanted else 200, body[:len(body) // 2] if short else body, headers, len(body))
        if short:
            self.close_connection = True

    # ---- S3

    def is_signed(self):
        state = self.server.state
        if not state.options.key:
            return True
        key, secret = state.options.key.rsplit(":", 1)
        given = re.fullmatch(r"AWS4-HMAC-SHA256 Credential=(.+?)/(\d{8}/[^/]+/s3/aws4_request), ?"
                             r"SignedHeaders=([a-z0-9;-]+), ?Signature=([0-9a-f]{64})",
                             self.headers.get("Authorization", ""))
        if not given:
            self.xml_error(403, "AccessDenied", "Access Denied")
        elif given[1] != key:
            self.xml_error(403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist.")
        elif not {"host", "x-amz-date", "x-amz-content-sha256"} <= set(given[3].split(";")) or \
                signature(secret, self, given[2], given[3]) != given[4]:
            self.xml_error(403, "SignatureDoesNotMatch", "The request signature does not match.")
        else:
            return True
        return False

    def list_bucket(self, bucket, query):
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        most = int(query.get("max-keys", ["1000"])[0])
        after = query.get("continuation-token", [""])[0]
        root = self.server.state.root / bucket
        rows = {}
        for path in root.rglob("*"):
            key = path.relative_to(root).as_posix()
            if not path.is_file() or not key.startswith(prefix):
                continue
            rest = key[len(prefix):]
            if delimiter and delimiter in rest:
                shared = prefix + rest.split(delimiter)[0] + delimiter
                rows[shared] = f"<CommonPrefixes><Prefix>{escape(shared)}</Prefix></CommonPrefixes>"
            else:
                s = path.stat()
                when = datetime.datetime.fromtimestamp(s.st_mtime, datetime.timezone.utc)
                rows[key] = (f"<Contents><Key>{escape(key)}</Key><LastModified>{when:%Y-%m-%dT%H:%M:%S.000Z}"
                             f"</LastModified><ETag>{escape(etag_of(path), {chr(34): '&quot;'})}</ETag>"
                             f"<Size>{s.st_size}</Size></Contents>")
        keys = [k for k in sorted(rows, key=str.encode) if k > after]
        more = len(keys) > most
        body = "".join(rows[k] for k in keys[:most])
        token = f"<NextContinuationToken>{escape(keys[most - 1])}</NextContinuationToken>" if more else ""
        self.reply(200, (f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>{bucket}</Name>'
                         f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{body}</ListBucketResult>").encode(),
                   {"Content-Type": "application/xml"})

    def s3(self, target, query, fault):
        state = self.server.state
        if fault == "expired-token":
            return self.xml_error(400, "ExpiredToken", "The provided token has expired.")
        if fault == "clock-skew":
            return self.xml_error(403, "RequestTimeTooSkewed", "The difference is too large.")
        if fault == "region":
            return self.xml_error(400, "AuthorizationHeaderMalformed", "The region is wrong.",
                                  more="<Region>eu-central-1</Region>")
        if not self.is_signed():
            return None
        bucket, _, key = target.partition("/")
        if not bucket or not (state.root / bucket).is_dir():
            return self.xml_error(404, "NoSuchBucket", "The specified bucket does not exist.")
        if not key:
            if state.options.deny_list:
                return self.xml_error(403, "AccessDenied", "Access Denied")
            return self.list_bucket(bucket, query)
        path = state.root / bucket / key
        if key.endswith("/") or not path.is_file():
            if state.options.deny_list:
                return self.xml_error(403, "AccessDenied", "Access Denied")
            return self.xml_error(404, "NoSuchKey", "The specified key does not exist.")
        return self.file(path, short=fault == "short")

    # ---- the web and the hub

    def web(self, target, fault):
        path = self.server.state.root / target
        if path.is_file():
            return self.file(path, short=fault == "short")
        if not path.is_dir():
            return self.reply(404, b"<html>not found</html>", {"Content-Type": "text/html"})
        if not self.path.endswith("/"):
            return self.reply(301, b"", {"Location": self.path + "/"})
        names = sorted(p.name + ("/" if p.is_dir() else "") for p in path.iterdir())
        links = "".join(f'<li><a href="{quote(n)}">{html.escape(n)}</a></li>' for n in ["../", *names])
        return self.reply(200, f"<html><ul>{links}</ul></html>".encode(), {"Content-Type": "text/html; charset=utf-8"})

    def hub(self, target, fault):
        state = self.server.state
        token = state.options.token
        if token and self.headers.get("Authorization") != "Bearer " + token:
            return self.reply(401, b"", {"X-Error-Code": "RepoNotFound"})
        if m := re.fullmatch(r"api/models/([^/]+/[^/]+)/revision/(.+)", target):
            if not (state.root / m[1]).is_dir():
                return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
            if m[2] not in ("main", "refs/pr/1", COMMIT):
                return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return self.reply(200, json.dumps({"id": m[1], "sha": COMMIT}).encode())
        if m := re.fullmatch(r"api/models/([^/]+/[^/]+)/tree/" + COMMIT, target):
            root = state.root / m[1]
            files = sorted(p for p in root.rglob("*"))
            page = int(urllib.parse.parse_qs(self.path.partition("?")[2]).get("cursor", ["0"])[0])
            size = 3  # files of a page
            rows = [{"type": "file" if p.is_file() else "directory", "path": p.relative_to(root).as_posix(),
                     "size": p.stat().st_size if p.is_file() else 0, "oid": "0" * 40}
                    for p in files[page * size:(page + 1) * size]]
            link = f'<http://{self.headers["Host"]}{self.path.partition("?")[0]}?recursive=true&cursor={page + 1}>; rel="next"'
            more = {"Link": link} if (page + 1) * size < len(files) else {}
            return self.reply(200, json.dumps(rows).encode(), more)
        if m := re.fullmatch(r"([^/]+/[^/]+)/resolve/" + COMMIT + "/(.+)", target):
            # Storage on another host, which must not receive the token.
            place = f"http://localhost:{self.server.server_port}/cas/{quote(m[1] + '/' + m[2])}?X-Signature=secret"
            return self.reply(302, b"", {"Location": place, "X-Repo-Commit": COMMIT})
        return self.reply(404)

    def cas(self, target, fault):
        if "Authorization" in self.headers:
            return self.xml_error(400, "InvalidArgument", "Only one auth mechanism allowed")
        return self.file(self.server.state.root / target, short=fault == "short")

    # ---- requests

    def do_GET(self):
        state = self.server.state
        raw, _, query = self.path.partition("?")
        target = urllib.parse.unquote(raw).lstrip("/")
        if target == "_control":
            with state.lock:
                body = json.dumps({"requests": state.requests, "most_open": state.most_open}).encode()
                state.requests, state.most_open = [], 0
            return self.reply(200, body)
        with state.lock:
            state.requests.append({"target": self.path, "range": self.headers.get("Range"),
                                   "authorization": self.headers.get("Authorization")})
            state.open_now += 1
            state.most_open = max(state.most_open, state.open_now)
        try:
            time.sleep(state.options.delay)
            self.serve(target, urllib.parse.parse_qs(query, keep_blank_values=True))
        finally:
            with state.lock:
                state.open_now -= 1

    def serve(self, target, query):
        fault = self.server.state.next_fault(urllib.parse.unquote(self.path))
        if fault == "500":
            return self.xml_error(500, "InternalError", "We encountered an internal error.")
        if fault == "slow-down":
            return self.xml_error(503, "SlowDown", "Please reduce your request rate.")
        if fault == "error-200":
            return self.xml_error(200, "InternalError", "We encountered an internal error.")
        if fault == "reset":
            return self.reset()
        if fault == "stall":
            self.send_response(206)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            time.sleep(20)
            return None
        if target.startswith("cas/"):
            return self.cas(target[4:], fault)
        if target == "web" or target.startswith("web/"):
            return self.web(target[4:].rstrip("/"), fault)
        if target.startswith("api/") or "/resolve/" in target:
            return self.hub(target, fault)
        return self.s3(target, query, fault)

    do_HEAD = do_GET

    def do_PUT(self):
        faults = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        with self.server.state.lock:
            self.server.state.faults = faults
        self.reply(200)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--key")
    parser.add_argument("--token")
    parser.add_argument("--delay", type=float, default=0)
    parser.add_argument("--deny-list", action="store_true")
    parser.add_argument("--replace", metavar="FILE", help="replace this file whenever a range of it was read")
    server = Server(("127.0.0.1", 0), Handler)
    server.state = State(parser.parse_args())
    print(server.server_port, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()

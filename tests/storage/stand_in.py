"""Serves one directory as S3, Google's XML interface, the Hugging Face hub and a plain web server.

    python3 tests/storage/stand_in.py DIRECTORY [--key ID:SECRET] [--token TOKEN] [--delay SECONDS] [--deny-list] [--terse-list] [--replace FILE] [--tls PEM]

Prints its port. Paths:  /DIR/KEY and /DIR?list-type=2   S3, path style: DIR is the bucket
                         /web/PATH                        files with ranges, directories as pages
                         /api/models/O/M/..., /O/M/resolve/COMMIT/PATH   the hub: O/M is a directory
                         /_control                        PUT a JSON of faults; GET counts and the requests' headers

With --key every S3 request must be signed with it (AWS Signature Version 4). Objects are written by PUT, in parts, and
removed by DELETE, with Content-MD5 checked. Uploads in progress are kept in memory. Faults are
{"fault": NAME, "times": N, "match": TEXT, "method": METHOD, "after": N}: after N others, the next N requests of that
method whose target contains TEXT go wrong:
500, slow-down, reset, short, error-200, expired-token, clock-skew, region, stall, trickle, denied; and of writing:
lost-reply (it is done, and nothing is answered), corrupt (other bytes are stored), lost-part (a part is answered and
not kept), crash (the server ends), kill (ends the process whose number is in
the file "pid").
Nothing here is from another project: it is written to the letter of the interfaces' documentation.
"""
import argparse
import base64
import contextlib
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
import signal
import socket
import ssl
import struct
import sys
import threading
import time
import urllib.parse
from xml.sax.saxutils import escape

BESIDE = ".object"  # ends the file of an object whose key is also a prefix: a directory
COMMIT = "c0ffee" * 6 + "beef"
quote = urllib.parse.quote


class State:
    def __init__(self, options):
        self.root = pathlib.Path(options.directory).resolve()
        self.options = options
        self.etags = self.root.parent / (self.root.name + ".etags")
        if self.etags.exists():
            ETAGS.update(json.loads(self.etags.read_text()))
        self.lock = threading.Lock()
        self.tree = threading.Lock()  # held while the names of objects change or are listed
        self.faults = []
        self.uploads = {}  # by id: bucket, key, {number: bytes}
        self.requests = []
        self.open_now = self.most_open = 0
        self.rounds = self.rounds_done = 0  # the longest chain of requests that each began after the one before had ended

    def next_fault(self, target, method="GET"):
        with self.lock:
            for fault in self.faults:
                if fault["times"] > 0 and fault.get("match", "") in target and fault.get("method", method) == method:
                    if fault.get("after", 0) > 0:
                        fault["after"] -= 1
                        continue
                    fault["times"] -= 1
                    if fault["fault"] == "kill":
                        os.kill(int(pathlib.Path(fault["pid"]).read_text()), signal.SIGKILL)
                    return fault["fault"]
        return None


ETAGS = {}  # of objects written in parts, by path: time of the file, ETag


def etag_of(path):
    s = path.stat()
    if ETAGS.get(str(path), (0,))[0] == s.st_mtime_ns:
        return ETAGS[str(path)][1]
    return '"%s"' % hashlib.md5(f"{s.st_ino} {s.st_size} {s.st_mtime_ns}".encode()).hexdigest()


def signature(secret, request, scope, names):
    """Returns the expected signature of a request, from its own signed headers and the scope that it states."""
    path, _, query = request.path.partition("?")
    pairs = sorted(p.split("=", 1) if "=" in p else [p, ""] for p in query.split("&") if p)
    headers = "".join(f"{n}:{' '.join(request.headers.get(n, '').split())}\n" for n in names.split(";"))
    canonical = "\n".join([request.command, path, "&".join(f"{k}={v}" for k, v in pairs), headers, names,
                           request.headers.get("x-amz-content-sha256", "")])
    if request.headers.get("x-amz-content-sha256") not in (hashlib.sha256(request.body).hexdigest(), "UNSIGNED-PAYLOAD"):
        return "of another body"
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
        if self.server.state.options.replace == str(path):  # with the same bytes and a later time
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
        elif (region := state.options.region) and given[2].split("/")[1] != region and "?location" not in self.path:
            named = ({"x-amz-bucket-region": region}, f"<Region>{region}</Region>") if not state.options.mute_region else ()
            self.xml_error(400, "AuthorizationHeaderMalformed", "The region is wrong.", *named)
        else:
            return True
        return False

    def list_bucket(self, bucket, query):
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        most = int(query.get("max-keys", ["1000"])[0])
        after = query.get("continuation-token", [""])[0]
        root = self.server.state.root / bucket
        rows = {}
        # Renames and removals wait meanwhile: a listing of a store shows objects whole or not at all.
        with self.server.state.tree:
            self.add_rows(root, prefix, delimiter, rows)
        keys = [k for k in sorted(rows, key=str.encode) if k > after]
        more = len(keys) > most
        body = "".join(rows[k] for k in keys[:most])
        token = f"<NextContinuationToken>{escape(keys[most - 1])}</NextContinuationToken>" if more else ""
        truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        if self.server.state.options.terse_list:
            truncated, body = "", body.replace("&quot;", "")
        self.reply(200, (f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>{bucket}</Name>'
                         f"{truncated}{token}{body}</ListBucketResult>").encode(),
                   {"Content-Type": "application/xml"})

    @staticmethod
    def add_rows(root, prefix, delimiter, rows):
        """Adds the XML of the objects and common prefixes of a listing, by key."""
        for path in root.rglob("*"):
            key = path.relative_to(root).as_posix().removesuffix(BESIDE)
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
        if self.command in ("PUT", "POST", "DELETE"):
            return self.write(target, query, fault)
        if "uploadId" in query:
            return self.list_parts(target, query)
        bucket, _, key = target.partition("/")
        if not bucket or not (state.root / bucket).is_dir():
            return self.xml_error(404, "NoSuchBucket", "The specified bucket does not exist.")
        if not key and "location" in query:
            return self.xml('<LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
                            f"{state.options.region}</LocationConstraint>", fault)
        if not key:
            if state.options.deny_list:
                return self.xml_error(403, "AccessDenied", "Access Denied")
            return self.list_bucket(bucket, query)
        path = state.root / bucket / key
        if path.is_dir() and not key.endswith("/"):
            path = path.parent / (path.name + BESIDE)
        if key.endswith("/") or not path.is_file():
            if state.options.deny_list:
                return self.xml_error(403, "AccessDenied", "Access Denied")
            return self.xml_error(404, "NoSuchKey", "The specified key does not exist.")
        return self.file(path, short=fault == "short")

    # ---- writing to S3

    def store(self, path, parts, is_whole):
        """Writes an object in one step. Returns its ETag: of the bytes, or of the sums of its parts."""
        sums = [hashlib.md5(p) for p in parts]
        etag = sums[0].hexdigest() if is_whole else \
            hashlib.md5(b"".join(s.digest() for s in sums)).hexdigest() + f"-{len(parts)}"
        root = self.server.state.root
        new = root.parent / f"{root.name}.new-{threading.get_ident()}"  # outside, so that no listing shows it
        new.write_bytes(b"".join(parts))
        with self.server.state.tree:
            path.parent.mkdir(parents=True, exist_ok=True)
            ETAGS[str(path)] = new.stat().st_mtime_ns, f'"{etag}"'
            new.rename(path)
            self.server.state.etags.write_text(json.dumps(ETAGS))  # for a server started later
        return f'"{etag}"'

    def write(self, target, query, fault):
        state = self.server.state
        bucket, _, key = target.partition("/")
        if not bucket or not (state.root / bucket).is_dir():
            return self.xml_error(404, "NoSuchBucket", "The specified bucket does not exist.")
        path = state.root / bucket / key
        sent = self.headers.get("Content-MD5")
        if sent and base64.b64decode(sent) != hashlib.md5(self.body).digest():
            return self.xml_error(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
        body = self.body[:-1] + b"?" if fault == "corrupt" and self.body else self.body
        upload = query.get("uploadId", [""])[0]
        with state.lock:
            known = state.uploads.get(upload)
        if upload and (not known or known[0] != str(path)):
            return self.xml_error(404, "NoSuchUpload", "The specified upload does not exist.")
        if self.command == "DELETE":
            if upload:
                with state.lock:
                    del state.uploads[upload]
            else:
                with state.tree:
                    if path.is_file():
                        path.unlink()
                        self.prune(path.parent, state.root / bucket)
            return self.reply(204)
        if self.command == "POST" and "uploads" in query:
            upload = f"upload-{time.monotonic_ns()}-{threading.get_ident()}"
            with state.lock:
                state.uploads[upload] = str(path), {}
            return self.xml(f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>"
                            "</InitiateMultipartUploadResult>", fault)
        if self.command == "PUT" and upload:
            number = int(query["partNumber"][0])
            if not 1 <= number <= 10000:
                return self.xml_error(400, "InvalidArgument", "Part number must be from 1 to 10000.")
            if fault != "lost-part":
                known[1][number] = body
            return self.written('"%s"' % hashlib.md5(body).hexdigest(), fault)
        if self.command == "PUT":
            return self.written(self.store(path, [body], True), fault)
        named = re.findall(r"<PartNumber>(\d+)</PartNumber><ETag>(.*?)</ETag>", self.body.decode())
        parts = []
        for i, (number, etag) in enumerate(named):
            part = known[1].get(int(number))
            if part is None or html.unescape(etag) != '"%s"' % hashlib.md5(part).hexdigest():
                return self.xml_error(400, "InvalidPart", "One or more of the specified parts could not be found.")
            if i + 1 < len(named) and len(part) < state.options.least_part:
                return self.xml_error(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum.")
            parts.append(part)
        if fault == "error-200":
            return self.xml("<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message>"
                            "</Error>", None)
        etag = self.store(path, parts, False)
        with state.lock:
            del state.uploads[upload]
        return self.xml(f"<CompleteMultipartUploadResult><ETag>{escape(etag, {chr(34): '&quot;'})}</ETag>"
                        "</CompleteMultipartUploadResult>", fault)

    @staticmethod
    def prune(directory, root):
        while directory != root and not any(directory.iterdir()):
            directory.rmdir()
            directory = directory.parent

    def written(self, etag, fault):
        return self.reset() if fault == "lost-reply" else self.reply(200, b"", {"ETag": etag})

    def xml(self, text, fault):
        if fault == "lost-reply":
            return self.reset()
        return self.reply(200, b'<?xml version="1.0"?>' + text.encode(), {"Content-Type": "application/xml"})

    def list_parts(self, target, query):
        state = self.server.state
        with state.lock:
            known = state.uploads.get(query["uploadId"][0])
            parts = dict(known[1]) if known and known[0] == str(state.root / target) else None
        if parts is None:
            return self.xml_error(404, "NoSuchUpload", "The specified upload does not exist.")
        size, after = 2, int(query.get("part-number-marker", ["0"])[0])  # parts per page
        numbers = [n for n in sorted(parts) if n > after]
        rows = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>&quot;{hashlib.md5(parts[n]).hexdigest()}&quot;</ETag>"
                       f"<Size>{len(parts[n])}</Size></Part>" for n in numbers[:size])
        more = len(numbers) > size
        marker = f"<NextPartNumberMarker>{numbers[size - 1]}</NextPartNumberMarker>" if more else ""
        return self.xml(f"<ListPartsResult><IsTruncated>{str(more).lower()}</IsTruncated>{marker}{rows}"
                        "</ListPartsResult>", None)

    # ---- the web and the hub

    def role(self, target):
        """Services of a machine that hand out the key: a container's, IMDSv2, STS."""
        key, secret = self.server.state.options.key.rsplit(":", 1)
        keys = {"AccessKeyId": key, "SecretAccessKey": secret, "Token": "", "Expiration": "2000-01-01T00:00:00Z"}
        names = self.headers
        if target == "container" and names.get("Authorization") == "t0ken":
            return self.reply(200, json.dumps(keys).encode())
        if target == "latest/api/token" and self.command == "PUT" and "x-aws-ec2-metadata-token-ttl-seconds" in names:
            return self.reply(200, b"imds-token")
        if target.startswith("latest/meta-data/iam/security-credentials/") and \
                names.get("x-aws-ec2-metadata-token") == "imds-token":
            return self.reply(200, b"role\n" if target.endswith("/") else json.dumps(keys).encode())
        sent = urllib.parse.parse_qs(self.body.decode())
        if target == "sts/" and sent.get("RoleArn") == ["arn:aws:iam::1:role/a b"] and \
                sent.get("WebIdentityToken") == ["t0ken"]:
            return self.xml("<Credentials>" + "".join(f"<{n}>{escape(v)}</{n}>" for n, v in [
                ("AccessKeyId", key), ("SecretAccessKey", secret), ("SessionToken", ""),
                ("Expiration", "2000-01-01T00:00:00Z")]) + "</Credentials>", None)
        return self.xml_error(403, "AccessDenied", "Not authorized")

    def web(self, target, fault):
        if self.server.state.options.query not in (None, self.path.partition("?")[2]):
            return self.reply(403)
        path = self.server.state.root / target
        if path.is_file():
            return self.file(path, short=fault == "short")
        if not path.is_dir():
            return self.reply(404, b"<html>not found</html>", {"Content-Type": "text/html"})
        if not self.path.endswith("/"):
            return self.reply(301, b"", {"Location": self.path + "/"})
        # nginx and Apache do not list names that begin with a dot, either.
        names = sorted(p.name + ("/" if p.is_dir() else "") for p in path.iterdir() if not p.name.startswith("."))
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
            names = sorted(p.relative_to(state.root / m[1]).as_posix() for p in (state.root / m[1]).rglob("*") if p.is_file())
            return self.reply(200, json.dumps({"id": m[1], "sha": COMMIT, "tags": [], "downloads": 0, "likes": 0,
                                               "private": bool(token), "siblings": [{"rfilename": n} for n in names]}).encode())
        if m := re.fullmatch(r"api/models/([^/]+/[^/]+)/tree/" + COMMIT, target):
            root = state.root / m[1]
            files = sorted(p for p in root.rglob("*"))
            page = int(urllib.parse.parse_qs(self.path.partition("?")[2]).get("cursor", ["0"])[0])
            size = 3  # files per page
            rows = [{"type": "file" if p.is_file() else "directory", "path": p.relative_to(root).as_posix(),
                     "size": p.stat().st_size if p.is_file() else 0, "oid": "0" * 40}
                    for p in files[page * size:(page + 1) * size]]
            link = f'<http://{self.headers["Host"]}{self.path.partition("?")[0]}?recursive=true&cursor={page + 1}>; rel="next"'
            more = {"Link": link} if (page + 1) * size < len(files) else {}
            return self.reply(200, json.dumps(rows).encode(), more)
        if m := re.fullmatch(r"([^/]+/[^/]+)/resolve/" + COMMIT + "/(.+)", target):
            # Storage on another host, which must not receive the token.
            place = f"http://localhost:{self.server.server_port}/cas/{quote(m[1] + '/' + m[2])}?X-Signature=secret"
            path = state.root / m[1] / m[2]
            if not path.is_file():
                return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            return self.reply(302, b"", {"Location": place, "X-Repo-Commit": COMMIT, "X-Linked-Etag": etag_of(path),
                                         "X-Linked-Size": str(path.stat().st_size)})
        return self.reply(404)

    def cas(self, target, fault):
        if "Authorization" in self.headers:
            return self.xml_error(400, "InvalidArgument", "Only one auth mechanism allowed")
        return self.file(self.server.state.root / target, short=fault == "short")

    # ---- requests

    body = b""

    def do_GET(self):
        state = self.server.state
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.path = re.sub("^http://[^/]+", "", self.path)  # of a client that takes it for a proxy
        raw, _, query = self.path.partition("?")
        target = urllib.parse.unquote(raw).lstrip("/")
        if target == "_control":
            with state.lock:
                body = json.dumps({"requests": state.requests, "most_open": state.most_open, "rounds": state.rounds,
                                   "uploads": len(state.uploads)}).encode()
                state.requests, state.most_open, state.rounds, state.rounds_done = [], 0, 0, 0
            return self.reply(200, body)
        with state.lock:
            round_ = state.rounds_done + 1
            state.requests.append({"target": self.path, "method": self.command, "range": self.headers.get("Range"),
                                   "authorization": self.headers.get("Authorization"), "round": round_})
            state.open_now += 1
            state.most_open = max(state.most_open, state.open_now)
            state.rounds = max(state.rounds, round_)
        try:
            time.sleep(state.options.delay)
            self.serve(target, urllib.parse.parse_qs(query, keep_blank_values=True))
        finally:
            with state.lock:
                state.open_now -= 1
                state.rounds_done = max(state.rounds_done, round_)

    def serve(self, target, query):
        fault = self.server.state.next_fault(urllib.parse.unquote(self.path), self.command)
        if fault == "kill":
            return self.reset()
        if fault == "crash":
            os._exit(1)
        if fault == "denied":
            return self.xml_error(403, "AccessDenied", "Access Denied")
        if fault == "500":
            return self.xml_error(500, "InternalError", "We encountered an internal error.")
        if fault == "slow-down":
            return self.xml_error(503, "SlowDown", "Please reduce your request rate.")
        if fault == "error-200" and self.command == "GET":
            return self.xml_error(200, "InternalError", "We encountered an internal error.")
        if fault == "reset":
            return self.reset()
        if fault == "stall":
            self.send_response(206)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            time.sleep(20)
            return None
        if fault == "trickle":  # a byte at a time, for ever
            self.send_response(206)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            with contextlib.suppress(OSError):  # until the client gives up
                while True:
                    self.wfile.write(b"?")
                    time.sleep(0.2)
            return None
        if target.startswith("_role/"):
            return self.role(target[6:])
        if target.startswith("cas/"):
            return self.cas(target[4:], fault)
        if target == "web" or target.startswith("web/"):
            return self.web(target[4:].rstrip("/"), fault)
        if target.startswith("api/") or "/resolve/" in target:
            return self.hub(target, fault)
        return self.s3(target, query, fault)

    do_HEAD = do_POST = do_DELETE = do_GET

    def do_CONNECT(self):
        """A proxy's tunnel, to this machine whatever the host."""
        with self.server.state.lock:
            self.server.state.requests.append({"target": self.path, "method": "CONNECT"})
        there = socket.create_connection(("127.0.0.1", int(self.path.rpartition(":")[2])))
        self.send_response(200)
        self.end_headers()

        def copy(source, destination):
            while data := source.recv(1 << 16):
                destination.sendall(data)
            with contextlib.suppress(OSError):  # it may be gone
                destination.shutdown(socket.SHUT_WR)

        back = threading.Thread(target=copy, args=(there, self.connection), daemon=True)
        back.start()
        copy(self.connection, there)
        back.join()
        self.close_connection = True

    def do_PUT(self):
        if self.path != "/_control":
            return self.do_GET()
        faults = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        with self.server.state.lock:
            self.server.state.faults = faults
        return self.reply(200)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """Says nothing of clients that are gone: tests kill them."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--key")
    parser.add_argument("--region", help="the one that requests must be signed for")
    parser.add_argument("--mute-region", action="store_true", help="do not name it to requests for another one")
    parser.add_argument("--token")
    parser.add_argument("--delay", type=float, default=0)
    parser.add_argument("--deny-list", action="store_true")
    parser.add_argument("--terse-list", action="store_true", help="list as fake-gcs-server: no IsTruncated, bare ETags")
    parser.add_argument("--query", help="what URLs of /web must end in: those are presigned")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tls", metavar="PEM", help="also serve https, with this key; the port goes to PEM.port")
    parser.add_argument("--least-part", type=int, default=5 << 20, help="bytes of a part that is not the last")
    parser.add_argument("--replace", metavar="FILE", help="replace this file whenever a range of it was read")
    options = parser.parse_args()
    server = Server(("127.0.0.1", options.port), Handler)
    server.state = State(options)
    if options.tls:
        secure = Server(("127.0.0.1", 0), Handler)
        secure.state = server.state
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.tls)
        secure.socket = context.wrap_socket(secure.socket, server_side=True)
        pathlib.Path(options.tls + ".port").write_text(str(secure.server_port))
        threading.Thread(target=secure.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()

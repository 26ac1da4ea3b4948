#!/usr/bin/env python3
"""Speed of reading and writing a bucket over links of limited bandwidth and of some latency: interleaved runs, medians.

  cmake --preset release && cmake --build --preset release
  tests/storage/swift.sh PYTHON tests/bench/storage_bench.py [--rounds 3] [--layers 16] [--shapes 0:0,0:40,1000:0,1000:40]
      [--sides curl,aws,verify,convert,copy,torch]
  PYTHON tests/bench/storage_bench.py --nginx --sides curl,verify,convert

PYTHON is that of tests/interop/venv.sh: it has boto3, s3fs and torch. Any server of S3 will do that AWS_* variables name
and that has a bucket "bucket". Swift sends about 60 MB/s on two cores; --nginx starts nginx instead, which is read from
by http:// and fills a link of 1 Gbit/s. Makes a checkpoint of TP=8 there (3.0 GB with 16 layers), and for each shape,
Mbit/s and milliseconds a request, starts tests/storage/shaping_proxy.py before the server (but not for 0:0) and times:
  curl      curl -Z of all files, by presigned URLs, to /dev/null
  aws       aws s3 cp --recursive, if aws is there
  verify    reshard verify: reading alone
  convert   reshard convert --to hf, to disk
  copy      reshard convert --to hf, from the bucket to the bucket
  torch     torch's DCP over s3fs (FsspecReader), reading alone
A link of R Mbit/s takes `link` seconds. Prints ratios to the faster of curl and aws, and to verify, the seconds of the
processor, which count on a busy machine, and the peak memory. --sides names some of these. Figures go to
docs/benchmarks.md with this command.
"""
import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import urllib.parse

import boto3
import interleaved

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE, COPY = "s3://bucket/step-1000", "s3://bucket/copy"
TORCH = """
import os, sys, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
reader = FsspecReader(sys.argv[1], key=os.environ["AWS_ACCESS_KEY_ID"], secret=os.environ["AWS_SECRET_ACCESS_KEY"],
                      client_kwargs={"endpoint_url": os.environ["AWS_ENDPOINT_URL_S3"]})
metadata = reader.read_metadata().state_dict_metadata
state = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items() if hasattr(m, "size")}
dcp.load(state, storage_reader=reader, no_dist=True)
"""


def client(endpoint):
    return boto3.client("s3", endpoint_url=endpoint, region_name=os.environ.get("AWS_REGION", "us-east-1"))


def objects(endpoint, prefix):
    pages = client(endpoint).get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
    return {o["Key"]: o["Size"] for page in pages for o in page.get("Contents", [])}


class Bucket:
    """The checkpoint in the bucket of the server that AWS_* variables name."""

    def __init__(self, bench):
        self.server = os.environ["AWS_ENDPOINT_URL_S3"]
        synth(bench, SOURCE, "--force")
        self.sizes = objects(self.server, "step-1000/")

    def source(self, endpoint):
        os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
        return SOURCE

    def urls(self, endpoint):
        return [client(endpoint).generate_presigned_url("get_object", {"Bucket": "bucket", "Key": key}, 3600)
                for key in self.sizes]

    def empty(self):
        for key in objects(self.server, "copy/"):
            client(self.server).delete_object(Bucket="bucket", Key=key)

    def close(self):
        pass


class Nginx:
    """The checkpoint in a directory that nginx serves, which this starts."""

    def __init__(self, bench):
        root = pathlib.Path(bench.path("served"))
        root.mkdir()
        synth(bench, str(root / "step-1000"))
        self.sizes = {str(f.relative_to(root)): f.stat().st_size for f in root.glob("step-1000/*") if f.is_file()}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.server = f"http://127.0.0.1:{free.getsockname()[1]}"
        config = pathlib.Path(bench.path("nginx.conf"))
        config.write_text(f"""daemon off; pid nginx.pid; error_log stderr crit; worker_processes 1; user root;
            events {{ worker_connections 256; }}
            http {{ access_log off; sendfile on; keepalive_requests 100000;
                    server {{ listen {self.server[7:]}; root {root}; autoindex on; }} }}""")
        self.process = subprocess.Popen(["nginx", "-p", bench.work, "-c", config])

    def source(self, endpoint):
        return endpoint + "/step-1000/"

    def urls(self, endpoint):
        return [f"{endpoint}/{name}" for name in self.sizes]

    def empty(self):
        pass

    def close(self):
        self.process.terminate()
        self.process.wait()


def synth(bench, *destination):
    subprocess.run([bench.reshard, "synth", *destination, "--model", bench.args.model, "--layers", bench.args.layers,
                    "--mesh", "tp=8", "-q"], check=True)


def commands(bench, endpoint, server):
    """{name: command} of the sides. What they make is bench.path("out") or COPY."""
    source, urls = server.source(endpoint), server.urls(endpoint)
    config = bench.path("curl.conf")
    pathlib.Path(config).write_text("".join(f'url = "{url}"\noutput = /dev/null\n' for url in urls))
    out, reshard = bench.path("out"), [bench.reshard]
    sides = {"curl": ["curl", "--no-progress-meter", "-f", "-Z", "--parallel-max", "32", "-K", config],
             "verify": [*reshard, "verify", source, "-q"], "convert": [*reshard, "convert", source, out, "--to", "hf", "-q"],
             "copy": [*reshard, "convert", source, COPY, "--to", "hf", "--resume", "never", "-q"],
             "torch": [sys.executable, "-W", "ignore", "-c", TORCH, source]}
    if aws := shutil.which("aws"):
        sides["aws"] = [aws, "s3", "cp", "--recursive", "--only-show-errors", source, out]
    return {name: sides[name] for name in bench.args.sides.split(",") if name in sides}


@contextlib.contextmanager
def shaped(server, rate, delay):
    """The endpoint of `server` behind a link of `rate` Mbit/s (0: any) and `delay` milliseconds a request."""
    if not rate and not delay:
        yield server
        return
    there = urllib.parse.urlsplit(server)
    with subprocess.Popen([sys.executable, ROOT / "tests/storage/shaping_proxy.py", there.hostname, str(there.port),
                           "--rate", str(rate), "--delay", str(delay)], stdout=subprocess.PIPE, text=True) as proxy:
        try:
            yield f"http://127.0.0.1:{int(proxy.stdout.readline())}"
        finally:
            proxy.kill()


def time_shape(bench, server, shape):
    """Times each side behind the link `shape`, MBIT:MILLISECONDS, and prints the table."""
    rate, delay = map(float, shape.split(":"))
    with shaped(server.server, rate, delay) as endpoint:
        sides = commands(bench, endpoint, server)
        times, memory = {name: [] for name in sides}, dict.fromkeys(sides, 0)
        processor = {name: [] for name in sides}
        for _ in range(bench.args.rounds):
            for name, command in sides.items():
                seconds, usage, _ = interleaved.run_once(command, bench.path("out"))
                times[name].append(seconds)
                processor[name].append(usage.ru_utime + usage.ru_stime)
                memory[name] = max(memory[name], usage.ru_maxrss * 1024)
                server.empty()
    size = sum(server.sizes.values())
    link = size * 8 / rate / 1e6 if rate else 0
    print(f"{shape}: {size / 1e9:.2f} GB in {len(server.sizes)} files, {bench.args.rounds} rounds, link {link:.1f} s")
    others = [name for name in ("curl", "aws") if name in times]
    bases = sorted(others, key=lambda n: interleaved.medians(times)[n])[:1] + ["verify"] * ("verify" in times)
    interleaved.print_table(times, {**{"/ " + base: interleaved.ratios(times, base) for base in bases},
                                    "CPU s": interleaved.medians(processor), "peak MiB": interleaved.mebibytes(memory)})
    sys.stdout.flush()


def main():
    with interleaved.bench(__doc__, rounds=3, layers={"default": "16"}, shapes={"default": "0:0,0:40,1000:0,1000:40"},
                           sides={"default": "curl,aws,verify,convert,copy,torch"}, nginx={"action": "store_true"}) as bench:
        with contextlib.closing((Nginx if bench.args.nginx else Bucket)(bench)) as server:
            for shape in bench.args.shapes.split(","):
                time_shape(bench, server, shape)


if __name__ == "__main__":
    main()

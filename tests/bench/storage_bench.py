#!/usr/bin/env python3
"""Speed of reading and writing a bucket over links of limited bandwidth and of some latency: interleaved runs, medians.

  cmake --preset release && cmake --build --preset release
  tests/storage/swift.sh PYTHON tests/bench/storage_bench.py [--rounds 3] [--layers 16] [--shapes 0:0,0:40,1000:0,1000:40]
      [--sides curl,aws,verify,convert,copy,torch]

PYTHON is that of tests/interop/venv.sh: it has boto3, s3fs and torch. Any server of S3 will do that AWS_* variables name
and that has a bucket "bucket". Makes a checkpoint of TP=8 in it (3.0 GB with 16 layers), and for each shape, Mbit/s and
milliseconds a request, starts tests/storage/shaping_proxy.py before the server and times:
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
import os
import pathlib
import shutil
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


def empty(endpoint, prefix):
    for key in objects(endpoint, prefix):
        client(endpoint).delete_object(Bucket="bucket", Key=key)


def commands(bench, endpoint, keys):
    """{name: command} of the sides. What they make is bench.path("out") or COPY."""
    urls = [client(endpoint).generate_presigned_url("get_object", {"Bucket": "bucket", "Key": key}, 3600) for key in keys]
    config = bench.path("curl.conf")
    pathlib.Path(config).write_text("".join(f'url = "{url}"\noutput = /dev/null\n' for url in urls))
    out, reshard = bench.path("out"), [bench.reshard]
    sides = {"curl": ["curl", "--no-progress-meter", "-f", "-Z", "--parallel-max", "32", "-K", config],
             "verify": [*reshard, "verify", SOURCE, "-q"], "convert": [*reshard, "convert", SOURCE, out, "--to", "hf", "-q"],
             "copy": [*reshard, "convert", SOURCE, COPY, "--to", "hf", "--resume", "never", "-q"],
             "torch": [sys.executable, "-W", "ignore", "-c", TORCH, SOURCE]}
    if aws := shutil.which("aws"):
        sides["aws"] = [aws, "s3", "cp", "--recursive", "--only-show-errors", SOURCE, out]
    return {name: sides[name] for name in bench.args.sides.split(",") if name in sides}


def main():
    with interleaved.bench(__doc__, rounds=3, layers={"default": "16"}, shapes={"default": "0:0,0:40,1000:0,1000:40"},
                           sides={"default": "curl,aws,verify,convert,copy,torch"}) as bench:
        server = os.environ["AWS_ENDPOINT_URL_S3"]
        subprocess.run([bench.reshard, "synth", SOURCE, "--model", bench.args.model, "--layers", bench.args.layers, "--mesh",
                        "tp=8", "--force", "-q"], check=True)
        keys = objects(server, "step-1000/")
        size = sum(keys.values())
        there = urllib.parse.urlsplit(server)
        for shape in bench.args.shapes.split(","):
            rate, delay = map(float, shape.split(":"))
            with subprocess.Popen([sys.executable, ROOT / "tests/storage/shaping_proxy.py", there.hostname, str(there.port),
                                   "--rate", str(rate), "--delay", str(delay)], stdout=subprocess.PIPE, text=True) as proxy:
                endpoint = f"http://127.0.0.1:{int(proxy.stdout.readline())}"
                os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
                sides = commands(bench, endpoint, keys)
                times, memory = {name: [] for name in sides}, dict.fromkeys(sides, 0)
                processor = {name: [] for name in sides}
                for _ in range(bench.args.rounds):
                    for name, command in sides.items():
                        seconds, usage, _ = interleaved.run_once(command, bench.path("out"))
                        times[name].append(seconds)
                        processor[name].append(usage.ru_utime + usage.ru_stime)
                        memory[name] = max(memory[name], usage.ru_maxrss * 1024)
                        empty(server, "copy/")
                proxy.kill()
            link = size * 8 / rate / 1e6 if rate else 0
            print(f"{shape}: {size / 1e9:.2f} GB in {len(keys)} files, {bench.args.rounds} rounds, link {link:.1f} s")
            others = [name for name in ("curl", "aws") if name in times]
            bases = sorted(others, key=lambda n: interleaved.medians(times)[n])[:1] + ["verify"] * ("verify" in times)
            interleaved.print_table(times, {**{"/ " + base: interleaved.ratios(times, base) for base in bases},
                                            "CPU s": interleaved.medians(processor),
                                            "peak MiB": interleaved.mebibytes(memory)})
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Buckets: what boto3 wrote is read, and what reshard writes is read by boto3 and by torch over s3fs. The servers are
moto and, where Debian's packages are installed, OpenStack Swift. Both check signatures. The hub: what reshard writes is
downloaded by huggingface_hub from a stand-in. Run by test_interop.py."""
import importlib.util
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESHARD = os.environ.get("RESHARD", str(ROOT / "build/release/reshard"))
SAMPLE = ROOT / "samples/checkpoints/tp8"
BUCKET = "checkpoints"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class OnAServer:
    """The tests. A class of a server sets url, key and secret, and calls open()."""

    @classmethod
    def open(cls):
        import boto3
        cls.s3 = boto3.client("s3", aws_access_key_id=cls.key, aws_secret_access_key=cls.secret, endpoint_url=cls.url,
                              region_name="us-east-1")
        cls.s3.create_bucket(Bucket=BUCKET)
        cls.directory = pathlib.Path(tempfile.mkdtemp(prefix="reshard-buckets-"))
        cls.addClassCleanup(shutil.rmtree, cls.directory)

    def reshard(self, *arguments, code=0, **variables):
        done = subprocess.run(
            [RESHARD, *map(str, arguments)], capture_output=True, text=True, timeout=300,
            env={**os.environ, "AWS_ENDPOINT_URL_S3": self.url, "AWS_ACCESS_KEY_ID": self.key,
                 "AWS_SECRET_ACCESS_KEY": self.secret, "AWS_EC2_METADATA_DISABLED": "true", **variables})
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def stored(self, prefix):
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {o["Key"][len(prefix):]: self.s3.get_object(Bucket=BUCKET, Key=o["Key"])["Body"].read()
                for page in pages for o in page.get("Contents", [])}

    def test_boto3_reads_what_is_written(self):
        for key, words in {"hf": ["--to", "hf"], "run a+b/step=5/\u00e9 #1": ["--to", "dcp", "--mesh", "tp=2"]}.items():
            local = self.directory / f"local-{words[1]}"
            self.reshard("convert", SAMPLE / "checkpoint", local, *words)
            self.reshard("convert", SAMPLE / "checkpoint", f"s3://{BUCKET}/{key}", *words)
            wanted = {p.relative_to(local).as_posix(): p.read_bytes() for p in local.rglob("*") if p.is_file()}
            self.assertEqual(self.stored(key + "/"), wanted)
            self.reshard("verify", SAMPLE / "checkpoint", "--against", f"s3://{BUCKET}/{key}")
        self.assertNotIn("Uploads", self.s3.list_multipart_uploads(Bucket=BUCKET))

    def test_what_goes_to_gs_with_an_hmac_key_is_the_same(self):
        """Google's XML interface is S3's, with keys and an endpoint of its own, and the region "auto"."""
        if self.checks_region:
            self.skipTest("this server refuses requests for other regions than its own")
        google = {"STORAGE_EMULATOR_HOST": self.url, "GS_ACCESS_KEY_ID": self.key, "GS_SECRET_ACCESS_KEY": self.secret}
        self.reshard("convert", SAMPLE / "checkpoint", f"gs://{BUCKET}/gs", "--to", "hf", **google)
        self.reshard("convert", SAMPLE / "checkpoint", self.directory / "gs", "--to", "hf")
        self.assertEqual(self.stored("gs/"), {p.name: p.read_bytes() for p in (self.directory / "gs").iterdir()})
        self.reshard("verify", f"gs://{BUCKET}/gs", "--against", SAMPLE / "checkpoint", **google)
        wrong = self.reshard("inspect", f"gs://{BUCKET}/gs", code=5, **google | {"GS_SECRET_ACCESS_KEY": "wrong"})
        self.assertIn("does not match the access key", wrong)

    def test_what_boto3_wrote_is_read(self):
        from boto3.s3.transfer import TransferConfig
        parts = TransferConfig(multipart_threshold=1 << 16, multipart_chunksize=5 << 20)
        for file in (SAMPLE / "checkpoint").iterdir():
            self.s3.upload_file(str(file), BUCKET, f"boto3/step=5/{file.name}", Config=parts)
        self.reshard("verify", f"s3://{BUCKET}/boto3/step=5", "--against", SAMPLE / "checkpoint")
        self.assertIn("does not match the access key",
                      self.reshard("inspect", f"s3://{BUCKET}/boto3", code=5, AWS_SECRET_ACCESS_KEY="wrong"))

    @unittest.skipUnless(importlib.util.find_spec("s3fs"), "s3fs needed")
    def test_torch_reads_over_s3fs(self):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
        import torch
        self.reshard("convert", SAMPLE / "checkpoint", f"s3://{BUCKET}/torch", "--to", "dcp", "--mesh", "tp=2")
        self.reshard("convert", SAMPLE / "checkpoint", self.directory / "torch", "--to", "dcp", "--mesh", "tp=2")

        def load(reader):
            metadata = reader.read_metadata().state_dict_metadata
            state = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items() if hasattr(m, "size")}
            dcp.load(state, storage_reader=reader, no_dist=True)
            return state

        where = {"client_kwargs": {"endpoint_url": self.url}}  # the one spelling that all releases of s3fs take
        got = load(FsspecReader(f"s3://{BUCKET}/torch", key=self.key, secret=self.secret, **where))
        wanted = load(dcp.FileSystemReader(str(self.directory / "torch")))
        self.assertEqual(sorted(got), sorted(wanted))
        for name, tensor in wanted.items():
            self.assertTrue(torch.equal(got[name], tensor), name)


@unittest.skipUnless(importlib.util.find_spec("moto") and importlib.util.find_spec("boto3"), "moto and boto3 needed")
class Buckets(OnAServer, unittest.TestCase):
    checks_region = False

    @classmethod
    def setUpClass(cls):
        port = free_port()
        cls.url = f"http://127.0.0.1:{port}"
        # The first calls make a user and its key; from then on everything must be signed with a key.
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "4"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        cls.addClassCleanup(server.wait)
        cls.addClassCleanup(server.kill)
        for _ in range(600):
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        import boto3
        iam = boto3.client("iam", aws_access_key_id="x", aws_secret_access_key="x", endpoint_url=cls.url,
                           region_name="us-east-1")
        iam.create_user(UserName="u")
        policy = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}'
        arn = iam.create_policy(PolicyName="p", PolicyDocument=policy)["Policy"]["Arn"]
        iam.attach_user_policy(UserName="u", PolicyArn=arn)
        key = iam.create_access_key(UserName="u")["AccessKey"]
        cls.key, cls.secret = key["AccessKeyId"], key["SecretAccessKey"]
        cls.open()


@unittest.skipUnless(importlib.util.find_spec("boto3"), "boto3 needed")
class BucketsOfSwift(OnAServer, unittest.TestCase):
    checks_region = True

    @classmethod
    def setUpClass(cls):
        server = subprocess.Popen(
            [ROOT / "tests/storage/swift.sh", "sh", "-c",
             'echo "$AWS_ENDPOINT_URL_S3" "$AWS_ACCESS_KEY_ID" "$AWS_SECRET_ACCESS_KEY"; exec cat > /dev/null'],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        told = server.stdout.readline().split()
        if not told:
            code = server.wait()
            if code == 77:
                raise unittest.SkipTest("Swift is not installed")
            raise AssertionError(f"Swift does not start: {code}")
        cls.addClassCleanup(server.wait)
        cls.addClassCleanup(server.stdin.close)
        cls.url, cls.key, cls.secret = told
        cls.open()


@unittest.skipUnless(importlib.util.find_spec("huggingface_hub"), "huggingface_hub needed")
class Hub(unittest.TestCase):
    def test_huggingface_hub_downloads_what_is_written(self):
        from huggingface_hub import snapshot_download
        with tempfile.TemporaryDirectory(prefix="reshard-hub-") as directory:
            (pathlib.Path(directory) / "served/org").mkdir(parents=True)
            model = pathlib.Path(directory) / "served/org/model"
            subprocess.run([RESHARD, "convert", SAMPLE / "checkpoint", model, "--to", "hf", "--max-shard-size", "100kB", "-q"],
                           check=True)
            with subprocess.Popen([sys.executable, ROOT / "tests/storage/stand_in.py", model.parents[1], "--token", "hf_t"],
                                  stdout=subprocess.PIPE, text=True) as server:
                try:
                    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
                    got = pathlib.Path(snapshot_download("org/model", endpoint=url, token="hf_t", cache_dir=directory))
                    self.assertEqual({p.name: p.read_bytes() for p in got.iterdir()},
                                     {p.name: p.read_bytes() for p in model.iterdir()})
                    done = subprocess.run([RESHARD, "verify", "hf://org/model", "--against", got], capture_output=True,
                                          text=True, env={**os.environ, "HF_ENDPOINT": url, "HF_TOKEN": "hf_t"})
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                finally:
                    server.kill()

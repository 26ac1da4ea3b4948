#!/usr/bin/env python3
"""Makes tests/data/families: what transformers makes of a tiny model of each kind, as names and shapes.

    python tests/interop/make_families.py [NAME...]

A file holds the config.json, the tensors that save_pretrained writes ("files") and, where they differ, those of the model
in memory ("memory"). The models are TINY_MODELS of test_interop.py.
"""
import json
import pathlib
import sys
import tempfile

from test_interop import ROOT, TINY_MODELS, Families, raw_safetensors

OUT = ROOT / "tests/data/families"
NOISE = ("architectures", "transformers_version", "initializer_range", "rope_parameters", "use_cache", "id2label", "label2id")


def pruned(config):
    return {k: pruned(v) if isinstance(v, dict) else v for k, v in config.items()
            if k not in NOISE and (k == "text_config" or not isinstance(v, (dict, float)))}


def lines(value):
    return "{\n" + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(value.items())) + "\n  }"


def main(names):
    OUT.mkdir(exist_ok=True)
    for name in names or TINY_MODELS:
        model = Families().build(*TINY_MODELS[name])
        with tempfile.TemporaryDirectory() as directory:
            saved = pathlib.Path(directory)
            model.save_pretrained(saved)
            config = json.loads((saved / "config.json").read_text())
            files = {k: v[1] for k, v in raw_safetensors(saved / "model.safetensors").items()}
        memory = {k: list(v.shape) for k, v in model.state_dict().items()}
        tied = {k for k in memory if k not in files and files.keys() < memory.keys()}
        parts = [f'  "config": {lines(pruned(config))}', f'  "files": {lines(files)}']
        if memory.keys() - tied != files.keys():
            parts.append(f'  "memory": {lines(memory)}')
        (OUT / f"{name}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

#!/usr/bin/env python3
"""Every model class in samples/families/architectures.jsonl, through the program.

    architectures.py audit|convert [--draw N] [--after PLACE] [--write] [TYPE...]

audit: a model of a config that no derivation saw, as save_pretrained writes it (a header, and a hole for the data), has no
finding in `reshard verify`, nor has one with other entries or another length of a list in the config. Three kinds of damage
each are found, with the right finding: the rows of one of two ranks, a transposed matrix, and a layer less.

convert: a small model of a random config, saved by torch as a DCP checkpoint {"app": {"model": ...}}, cut for two ranks, and
converted to Hugging Face's files, is the same model to from_pretrained, in every bit. What transformers cannot load from its
own save_pretrained is left out.

All classes of all types or of those that are named, in an order that is random and always the same; or N of them. Each run
prints the place where it ended, and --after that place continues it. --write puts the counts into docs/families.md. RESHARD is the program (default build/release/reshard). With RESHARD_ARCHITECTURES, a file like
samples/families/architectures.jsonl, audit compares with its rows and not with those that the program contains.
"""
import argparse
import collections
import copy
import functools
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "samples/families"))

import architectures as derivation
import generate

RESHARD = os.environ.get("RESHARD", str(ROOT / "build/release/reshard"))
MARKS = "<!-- architectures.py: begin -->", "<!-- architectures.py: end -->"
MOST_ELEMENTS = 50_000_000  # of a model that is written
LAYERS = re.compile(r"((?:^|.*?\.)(?:layers?|h|blocks?))\.(\d+)\.")


def classes_of(arguments):
    """[(model type, class)] to look at."""
    lines = {t: json.loads(line)["classes"] for t, line in tables().items() if not arguments.types or t in arguments.types}
    places = sorted((place_of(t, name), t, name) for t, names in lines.items() for name in names)
    drawn = [p for p in places if p[0] > arguments.after][:arguments.draw]
    if drawn:
        print(f"{len(drawn)} classes, until --after {drawn[-1][0]}")
    return [(t, cls) for _, t, name in drawn for cls in generate.classes_of(t) if cls.__name__ == name]


def place_of(model_type, name):
    """The place of a class in the order, from 0 to 1, whatever other classes there are."""
    return round(random.Random(f"36 {model_type}/{name}").random(), 6)


def in_files(shapes):
    """{name in files: shape} of what a Builder gives."""
    return {n.removeprefix(derivation.FILES): x for n, x in shapes.items() if n[0] not in derivation.MEMORY + derivation.TIED}


def write_model(directory, shapes, config):
    directory.mkdir(parents=True)
    header, end = {}, 0
    for name, shape in sorted(shapes.items()):
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (directory / "config.json").write_text(config)


def own_table(model_type, directory):
    """Options that make the program use the table of a file of one's own."""
    if "RESHARD_ARCHITECTURES" not in os.environ:
        return []
    table = pathlib.Path(directory) / "table.json"
    table.write_text(tables()[model_type] + "\n")
    return ["--family-file", str(table)]


@functools.cache
def tables():
    return generate.by_type(generate.ARCHITECTURES)


def verify(model_type, shapes, config):
    """(ids of the findings, the row that says what was compared)."""
    with tempfile.TemporaryDirectory() as directory:
        write_model(pathlib.Path(directory) / "m", shapes, config)
        done = subprocess.run([RESHARD, "verify", f"{directory}/m", "--config", f"{directory}/m/config.json", "--json",
                               *own_table(model_type, directory)],
                              capture_output=True, text=True)
    if not done.stdout.startswith("{"):
        return ["no report: " + done.stderr.strip()[-200:]], ""
    report = json.loads(done.stdout)
    return [f"{f['id']} {f['what']} {f['tensors'][:2]}" for f in report["findings"]], report["facts"].get("config", "")


def with_other_lists(model_type, cls):
    """Yields (what was changed, config, shapes) of models with another list: longer, shorter, in another order, of other numbers."""
    build = derivation.Builder(cls)
    d = derivation.Derivation(model_type, cls.__name__, cls.base_model_prefix, build)
    for path, value in d.values.items() if d.start() else ():
        if derivation.OPAQUE.search(path) or not isinstance(value, list) or not value:
            continue
        for other in (value + value[-1:], value[:-1], *derivation.with_other_entries(value)):
            config = copy.deepcopy(d.base)
            derivation.put(config, path, other)
            config.pop("model_type", None)
            try:
                made = d.config_class(**config)
                yield f"{path}={other}", made, in_files(build(made))
            except Exception:  # the config describes no model
                continue


def is_unchecked(findings):
    return any(finding.startswith("model-unknown") for finding in findings)


def damages(shapes):
    """{kind: (words of the finding, shapes)} of three kinds of damage, where the model has something to damage."""
    out = {}
    matrices = [n for n, x in shapes.items() if len(x) == 2 and x[0] != x[1] and x[0] % 2 == 0 and x[1] > 1 and ".0." in n]
    if matrices:
        name = max(matrices, key=lambda n: (shapes[n][0] * shapes[n][1], n))
        rows, columns = shapes[name]
        out["one rank's rows"] = "shape-part", {**shapes, name: [rows // 2, columns]}
        out["a transposed matrix"] = "shape-transposed", {**shapes, name: [columns, rows]}
    layers = {}
    for name in shapes:
        if found := LAYERS.match(name):
            layers.setdefault(found[1], set()).add(int(found[2]))
    whole = {stack: numbers for stack, numbers in layers.items() if len(numbers) > 1}
    if whole:
        stack = max(whole, key=lambda s: (len(whole[s]), s))
        last = f"{stack}.{max(whole[stack])}."
        out["a layer less"] = "missing", {n: x for n, x in shapes.items() if not n.startswith(last)}
    return out


def audit_class(model_type, cls):
    """What `verify` says of a class: {"healthy": findings, "row": text, "found": kinds of damage, "missed": the same}."""
    found = derivation.further_model(model_type, cls)
    if not found:
        return {"why": "no further config makes a model"}
    config, shapes = found
    config.architectures = [cls.__name__]
    shapes, text = in_files(shapes), config.to_json_string()
    ids, row = verify(model_type, shapes, text)
    if is_unchecked(ids):
        return {"why": row}
    for change, other, of_other in with_other_lists(model_type, cls):
        other.architectures = [cls.__name__]
        found = verify(model_type, of_other, other.to_json_string())[0]
        ids += [] if is_unchecked(found) else [f"{change}: {finding}" for finding in found[:1]]
    out = {"healthy": ids, "row": row, "found": [], "missed": {}}
    for kind, (word, damaged) in damages(shapes).items():
        got, _ = verify(model_type, damaged, text)
        if any(line.startswith(word) for line in got):
            out["found"].append(kind)
        else:
            out["missed"][kind] = got[:2]
    return out


def audit(arguments):
    reports = []
    for model_type, cls in classes_of(arguments):
        reports.append(audit_class(model_type, cls))
        if reports[-1].get("healthy") or reports[-1].get("missed") or "why" in reports[-1]:
            print(json.dumps({"type": model_type, "class": cls.__name__, **reports[-1]}), flush=True)
    built = [r for r in reports if "row" in r]
    alarms = sum(bool(r["healthy"]) for r in built)
    found, missed = (collections.Counter(kind for r in built for kind in r[word]) for word in ("found", "missed"))
    kinds = ", ".join(f"{kind} {found[kind]} of {found[kind] + missed[kind]}" for kind in sorted({*found, *missed}))
    whole = sum("not checked" not in r["row"] for r in built)
    text = (f"audit: {len(built)} classes, {whole} of them compared whole. Healthy models with a finding: {alarms}. "
            f"Damages found: {sum(found.values())} of {sum(found.values()) + sum(missed.values())} ({kinds}).")
    return text, not alarms and not missed


# ---- convert

def small_config(model_type, cls):
    """A config of a model that is as small as its numbers can be made one by one; None where transformers builds none."""
    found = derivation.further_model(model_type, cls)
    return derivation.smaller(derivation.Builder(cls), found[0])[0] if found else None


def random_model(cls, config):
    torch.manual_seed(36)
    with derivation.without_initialization():
        model = cls(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape)) if tensor.is_floating_point() else None
    return model.to(torch.bfloat16)


def difference(cls, model, directory):
    """What from_pretrained has otherwise than the model; "" if nothing."""
    loaded, info = cls.from_pretrained(directory, output_loading_info=True, dtype=torch.bfloat16)
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        return f"keys: {[sorted(map(str, x))[:2] for x in (info['missing_keys'], info['unexpected_keys'], info['mismatched_keys'])]}"
    parameters = dict(loaded.named_parameters())
    wrong = [n for n, t in model.named_parameters() if not torch.equal(t.to(parameters[n].dtype), parameters[n])]
    return f"values: {wrong[:2]}" if wrong else ""


def run(*words):
    done = subprocess.run([RESHARD, *map(str, words)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"reshard {words[0]}: {done.stderr.strip()[-300:]}")


def convert_class(model_type, cls, directory):
    config = small_config(model_type, cls)
    if not config:
        return {"skipped": "no further config makes a model"}
    try:
        model = random_model(cls, config)
        if sum(t.numel() for t in model.state_dict().values()) > MOST_ELEMENTS:
            return {"skipped": "too large"}
        model.save_pretrained(directory / "own")
        own = difference(cls, model, directory / "own")
    except Exception as e:  # which transformers cannot build, save or load
        own = f"{type(e).__name__}: {' '.join(str(e).split())[:100]}"
    if own:
        return {"skipped": f"its own save_pretrained: {own}"}
    (directory / "run").mkdir()
    dcp.save({"app": {"model": model.state_dict()}}, checkpoint_id=directory / "run/step-1", no_dist=True)
    for file in (directory / "own").glob("*.json"):
        if "safetensors" not in file.name:
            shutil.copy(file, directory / "run" / file.name)
    run("convert", directory / "run/step-1", directory / "run/two", "--to", "dcp", "--mesh", "dp_shard=2")
    run("convert", directory / "run/two", directory / "hf", "--to", "hf")
    return {"wrong": difference(cls, model, directory / "hf")}


def convert(arguments):
    counts = collections.Counter()
    for model_type, cls in classes_of(arguments):
        with tempfile.TemporaryDirectory() as directory:
            try:
                report = convert_class(model_type, cls, pathlib.Path(directory))
            except Exception as e:  # a conversion that failed
                report = {"wrong": f"{type(e).__name__}: {e}"}
        result = "skipped" if "skipped" in report else "wrong" if report["wrong"] else "same"
        counts[result] += 1
        if result != "same":
            print(json.dumps({"type": model_type, "class": cls.__name__, **report}), flush=True)
    text = (f"convert: {counts['same']} of {counts['same'] + counts['wrong']} classes are the same model after a conversion from "
            f"DCP on two ranks; transformers cannot load {counts['skipped']} others from its own files.")
    return text, not counts["wrong"]


def write(command, text):
    """Replaces the line of this command in docs/families.md."""
    before, _, rest = generate.REPORT.read_text().partition(MARKS[0])
    inside, _, after = rest.partition(MARKS[1])
    lines = [line for line in inside.splitlines() if line and not line.startswith(f"- {command}:")] + [f"- {text}"]
    generate.REPORT.write_text("\n".join([before + MARKS[0], *sorted(lines), MARKS[1] + after]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["audit", "convert"])
    parser.add_argument("--draw", type=int, help="this many classes")
    parser.add_argument("--after", type=float, default=0, help="the place where an earlier run ended")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("types", nargs="*")
    arguments = parser.parse_args()
    text, is_right = {"audit": audit, "convert": convert}[arguments.command](arguments)
    print(text)
    if arguments.write:
        write(arguments.command, text)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()

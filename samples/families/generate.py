#!/usr/bin/env python3
"""Generates the data that model families take from transformers, and compares the families' tables with its models.

    generate.py kept [--check] [--quick] [TYPE...]    samples/families/kept_float32.json: parameters kept in float32
    generate.py tables [--write] [NAME...]            compares the families' tables with tiny models
    generate.py orders [--check]                      samples/families/parameter_order.json: how torch numbers parameters
    generate.py transposed [--check]                  samples/families/transposed.json: matrices stored [in, out]
    generate.py architectures [TYPE...]               samples/families/architectures.jsonl: names and shapes as formulas
    generate.py samples TYPE...                       tests/data/architectures.jsonl: models of other configs, for tests

kept: covers every model type of the installed transformers, or the given ones. Builds models from their default configs and
from TINY_MODELS. --check compares instead of writing, and exits with 1 on a difference. --quick only reads the lists that
classes declare and builds no models: seconds instead of minutes.

tables: covers every model of TINY_MODELS (tests/interop/test_interop.py). Compares names, shapes, ties and dtypes with those
of `reshard check`. --write puts the report between two marks in docs/families.md, and the parameters kept in float32 into
tests/data/kept_float32.json.

orders: covers every model type of TINY_MODELS whose parameters have the same names in memory and in files. --check compares
instead of writing.
transposed: covers every model type whose code uses transformers' Conv1D. --check compares instead of writing.
architectures: covers every model type that is neither a family's nor in samples/families/derivations.jsonl, which says what
was found out of each class; with --all every type, or the given ones. See architectures.py. Each line is written when its type
is derived, so an interrupted run loses nothing; lines of other types are kept. --report only writes the counts into
docs/families.md.

Models are built on torch's meta device, so they have no weights and nothing is downloaded. Needs torch and transformers, and
RESHARD (default build/release/reshard) for tables.
"""
import argparse
import collections
import contextlib
import fnmatch
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.models.auto import configuration_auto, modeling_auto

import architectures as derivation

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests/data/architectures.jsonl"
ARCHITECTURES = pathlib.Path(os.environ.get("RESHARD_ARCHITECTURES", ROOT / "samples/families/architectures.jsonl"))
DERIVATIONS = ROOT / "samples/families/derivations.jsonl"  # what was found out of each class
TABLE = ROOT / "samples/families/kept_float32.json"
REPORT = ROOT / "docs/families.md"
SAMPLES = ROOT / "tests/data/kept_float32.json"
ORDERS = ROOT / "samples/families/parameter_order.json"
TRANSPOSED = ROOT / "samples/families/transposed.json"
MARKS = "<!-- generate.py: begin -->", "<!-- generate.py: end -->"
ARCHITECTURE_MARKS = "<!-- generate.py architectures: begin -->", "<!-- generate.py architectures: end -->"
SECONDS = 90  # for one model


# ---- models without weights

def model_types():
    return sorted(configuration_auto.CONFIG_MAPPING_NAMES)


def classes_of(model_type):
    """Returns the model classes of a type whose packages are installed."""
    names = set()
    for mapping in dir(modeling_auto):
        found = getattr(modeling_auto, mapping).get(model_type, ()) if mapping.endswith("_MAPPING_NAMES") else ()
        names.update([found] if isinstance(found, str) else found)
    found = (getattr(transformers, name, None) for name in sorted(names))
    return [cls for cls in found if isinstance(cls, type) and hasattr(cls, "_keep_in_fp32_modules_strict")]


def own_classes(model_type):
    """Those whose config is the type's own, and not that of a part. Some types have no class but another type's: EXAONE 3 is a
    Llama with other names in files."""
    config, classes = configuration_auto.CONFIG_MAPPING[model_type], classes_of(model_type)
    return [cls for cls in classes if issubclass(config, cls.config_class or config)] or classes


def declares_kept(model_type):
    """Returns whether a model file of the type declares such a list. Imports nothing."""
    package = pathlib.Path(transformers.__file__).parent / "models" / configuration_auto.model_type_to_module_name(model_type)
    return any("_keep_in_fp32_modules" in file.read_text() for file in package.glob("modeling_*.py"))


def is_kept(name, patterns):
    """Returns whether a name matches a dtype plan, like transformers' core_model_loading.build_glob_alternation."""
    return any(re.search(p.replace("*", ".*"), name) for p in patterns)


def loaded_dtypes(model, dtype):
    """Returns {name in memory: dtype} after from_pretrained(dtype=) of a model that was built in bfloat16."""
    plan = model._get_dtype_plan(dtype)
    return {name: torch.float32 if is_kept(name, plan) else dtype if tensor.dtype == torch.bfloat16 else tensor.dtype
            for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def saved(model, dtype):
    """Returns {name in files: (shape, dtype)} as save_pretrained writes a model that was loaded in that dtype."""
    dtypes = loaded_dtypes(model, dtype)
    state = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in model.state_dict().items()}
    state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    return {name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in state.items()}


# ---- Parameters kept in float32

def as_glob(pattern):
    """Returns a glob over whole names for a regular expression that transformers searches in names."""
    if not re.fullmatch(r"[\w.*]+", pattern):
        raise ValueError(f"{pattern!r}: neither a part of a name nor a glob")
    return "*" + pattern.replace(".", "?") + "*"


def matches(name, globs):
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def globs_for(wanted, others):
    """Returns a small set of globs that match every name in `wanted` and none in `others`."""
    out = []
    for name in sorted(wanted, key=len):
        if matches(name, out):
            continue
        parts = re.sub(r"\.\d+(?=\.|$)", ".*", name).split(".")
        ends = ["*" + ".".join(["", *parts[i:]]) for i in range(len(parts) - 1, 0, -1)] + ["*" + ".".join(parts)]
        modules = ["*" + ".".join([*parts[:i], "*"]) for i in range(1, len(parts))]
        fitting = [g for g in modules + ends if not any(fnmatch.fnmatchcase(o, g) for o in others)]
        # Choose the glob that matches most names; of equal ones, the shortest.
        best = max(fitting, key=lambda g: (sum(fnmatch.fnmatchcase(w, g) for w in wanted), g in ends, -len(g)))
        out.append(best)
    return out


class Kept:
    """The parameters that classes of one model type keep in float32, as globs over names in memory and in files."""

    def __init__(self, model_type):
        self.model_type, self.always, self.float16 = model_type, set(), set()
        self.replaced = set()  # globs of the classes that match too many names in files
        self.problems = []

    def declare(self, classes):
        for cls in classes:
            self.always.update(map(as_glob, cls._keep_in_fp32_modules_strict or ()))
            self.float16.update(map(as_glob, cls._keep_in_fp32_modules or ()))

    def observe(self, models):
        """Adds what only instances show: lists of inner modules, parameters created in float32, other names in files."""
        for model in models:
            self.always.update(map(as_glob, model._keep_in_fp32_modules_strict))
            self.float16.update(map(as_glob, model._keep_in_fp32_modules))
        for dtype, globs in ((torch.bfloat16, self.always), (torch.float16, self.float16)):
            kept, others = self.names(models, dtype)
            for glob in [g for g in self.always | globs if any(fnmatch.fnmatchcase(name, g) for name in others - kept)]:
                self.replaced.add(glob)
                self.always.discard(glob)
                self.float16.discard(glob)
            known = self.always | globs
            globs.update(globs_for({name for name in kept - others if not matches(name, known)}, others))
        self.float16 -= self.always

    def names(self, models, dtype):
        """Returns the names kept in float32 by a model that was loaded in that dtype, and the others; in memory and in files."""
        kept, others = set(), set()
        for model in models:
            in_memory = loaded_dtypes(model, dtype)
            in_files = self.in_files(model, dtype) if torch.float32 in in_memory.values() else {}
            for name, to in [*in_memory.items(), *in_files.items()]:
                (kept if to == torch.float32 else others).add(name)
        return kept, others

    def make(self, classes):
        models = [make_tiny(t, members) for t, members in tiny_models().values() if t == self.model_type]
        for cls in classes:
            try:
                config = transformers.AutoConfig.for_model(self.model_type)
                with derivation.made_as(torch.bfloat16, SECONDS):
                    models.append(cls(config))
            except Exception as e:  # a default config that makes no model, or a package that is not there
                self.problems.append(f"{cls.__name__}: {type(e).__name__}: {str(e).strip()[:80]}")
        return models

    def in_files(self, model, dtype):
        try:
            return {name: getattr(torch, to) for name, (_, to) in saved(model, dtype).items()
                    if getattr(torch, to).is_floating_point}
        except Exception as e:
            self.problems.append(f"{type(model).__name__}: names in files: {type(e).__name__}")
            return {}

    def row(self):
        return {word: sorted(globs) for word, globs in
                (("always", self.always), ("float16", self.float16), ("replaced", self.replaced)) if globs}


def kept_rows(types, quick):
    """Returns {model type: row}, and the types that could not be built."""
    rows, problems = {}, []
    for model_type in types:
        kept = Kept(model_type)
        classes = classes_of(model_type)
        kept.declare(classes)
        if not quick:
            kept.observe(kept.make(classes))
        problems += [f"{model_type}: {p}" for p in kept.problems]
        rows[model_type] = kept.row()
    return rows, problems


def table_of_rows(rows):
    groups = collections.defaultdict(list)
    for model_type in sorted(rows):
        groups[json.dumps(rows[model_type])].append(model_type)
    others = groups.pop("{}", [])
    kept = [{"model_types": types, **json.loads(row)} for row, types in sorted(groups.items(), key=lambda g: g[1])]
    return {"transformers": transformers.__version__, "kept": kept, "others": others}


def rows_of_table(table):
    rows = {t: {k: v for k, v in row.items() if k != "model_types"} for row in table["kept"] for t in row["model_types"]}
    return rows | {t: {} for t in table["others"]}


def table_text(table):
    rows = ",\n    ".join(map(json.dumps, table["kept"]))
    others = json.dumps(table["others"])
    lines = re.sub(r"(.{1,110}), ", r"\1,\n    ", others[1:-1])
    return (f'{{\n  "transformers": {json.dumps(table["transformers"])},\n  "kept": [\n    {rows}\n  ],\n'
            f'  "others": [\n    {lines}\n  ]\n}}\n')


def kept_differences(old, new, quick):
    """Returns lines that describe how the rows of the table differ. Rows of --quick are less complete."""
    lines = []
    for model_type, row in new.items():
        if model_type not in old:
            lines.append(f"{model_type}: not in the table")
            continue
        for word in ("always", "float16"):
            before, after = set(old[model_type].get(word, ())), set(row.get(word, ()))
            known = before | set(old[model_type].get("replaced", ())) | set(old[model_type].get("always", ()))
            lines += [f"{model_type}: {word}: {g} is missing" for g in sorted(after - known)]
            lines += [f"{model_type}: {word}: {g} is no longer there" for g in sorted(before - after) if not quick]
    return lines


def kept(arguments):
    old = rows_of_table(json.loads(TABLE.read_text())) if TABLE.exists() else {}
    types = arguments.types or [t for t in model_types() if not arguments.quick or declares_kept(t)]
    new, problems = kept_rows(types, arguments.quick)
    if not arguments.check:
        TABLE.write_text(table_text(table_of_rows(old | new if arguments.types else new)))
        for problem in problems:
            print(problem, file=sys.stderr)
        return 0
    lines = kept_differences(old, new, arguments.quick)
    print("\n".join(lines) or f"kept_float32.json is as transformers {transformers.__version__} has it: {len(new)} model types")
    return 1 if lines else 0


# ---- Matrices stored as [in, out]

def uses_conv1d(model_type):
    """Returns whether a model file of the type uses transformers' Conv1D. Imports nothing."""
    package = pathlib.Path(transformers.__file__).parent / "models" / configuration_auto.model_type_to_module_name(model_type)
    return any(re.search(r"pytorch_utils import [^)]*\bConv1D\b", file.read_text()) for file in package.glob("modeling_*.py"))


def transposed_globs(model_type):
    """Returns globs of the names of the matrices that are Conv1D's in any class of the type."""
    out = set()
    for cls in classes_of(model_type):
        for members in ({}, {"add_cross_attention": True}):
            config = transformers.AutoConfig.for_model(model_type, **members)
            with derivation.made_as(torch.bfloat16, SECONDS), contextlib.suppress(AttributeError, TypeError):
                for name, module in cls(config).named_modules():
                    if isinstance(module, transformers.pytorch_utils.Conv1D):
                        out.add("*." + ".".join([*name.split(".")[-2:], "weight"]))
    return sorted(out)


def transposed(arguments):
    groups = collections.defaultdict(list)
    for model_type in filter(uses_conv1d, model_types()):
        if globs := transposed_globs(model_type):
            groups[json.dumps(globs)].append(model_type)
    rows = ",\n    ".join(f'{{"model_types": {json.dumps(types)}, "weights": {globs}}}'
                          for globs, types in sorted(groups.items(), key=lambda g: g[1]))
    text = f'{{\n  "transformers": {json.dumps(transformers.__version__)},\n  "transposed": [\n    {rows}\n  ]\n}}\n'
    if not arguments.check:
        TRANSPOSED.write_text(text)
        return 0
    if json.loads(TRANSPOSED.read_text())["transposed"] == json.loads(text)["transposed"]:
        print(f"transposed.json is as transformers {transformers.__version__} has it")
        return 0
    print(f"transposed.json differs from transformers {transformers.__version__}:\n{text}")
    return 1


# ---- Tables of families

NARROW = torch.bfloat16, torch.float16
OTHER_PARTS = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|visual|vision_model|image_newline)\b|\.act_fn\.")


@functools.cache
def tiny_models():
    sys.path.insert(0, str(ROOT))
    from tests.interop.test_interop import TINY_MODELS
    return TINY_MODELS


def make_tiny(model_type, members):
    config = transformers.AutoConfig.for_model(model_type, **members)
    auto = transformers.AutoModelForImageTextToText if "text_config" in members else transformers.AutoModelForCausalLM
    cls = auto._model_mapping[type(config)]
    config.architectures = [cls.__name__]
    with derivation.made_as(torch.bfloat16, SECONDS):
        return cls(config)


def compared(tensors, model_type):
    """Returns the parameters that a table lists, under its names."""
    out = {name.removeprefix("transformer."): value for name, value in tensors.items() if not OTHER_PARTS.search(name)}
    # transformers 5.24 renames every ".mlp." on saving; published files keep it in the dense layers.
    if model_type == "kimi_linear":
        out = {re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", k): v for k, v in out.items()}
    return out


def table_of(config, dtype):
    """Returns {name: (shape, dtype)} of the tensors that must be stored and the names of the tied ones, by `reshard check`."""
    reshard = os.environ.get("RESHARD", str(ROOT / "build/release/reshard"))
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        done = subprocess.run([reshard, "check", "--config", f"{directory}/config.json", "--mesh", "dp_shard=1", "--tensors",
                               "--json", "--dtype", str(dtype).removeprefix("torch.")], capture_output=True, text=True)
    if not done.stdout.startswith("{"):
        raise ValueError(done.stderr.strip())
    tensors = json.loads(done.stdout)["tensors"]
    stored = {t["name"]: (t["shape"], t["dtype"]) for t in tensors if not t["tied"]}
    return compared(stored, config.model_type), set(compared({t["name"]: t for t in tensors if t["tied"]}, config.model_type))


def differences(ours, theirs):
    lines = [f"{name} is not in the table" for name in sorted(theirs.keys() - ours.keys())]
    lines += [f"{name} is not in the model" for name in sorted(ours.keys() - theirs.keys())]
    return lines + [f"{name}: {ours[name]} in the table, {theirs[name]} in the model"
                    for name in sorted(ours.keys() & theirs.keys()) if ours[name] != theirs[name]]


def compare(model):
    """Returns lines that describe how the tables differ from a model, and {dtype: names in files kept in float32}."""
    lines, kept_names, tensors = [], {}, 0
    for dtype in NARROW:
        ours, tied = table_of(model.config, dtype)
        files = saved(model, dtype)
        theirs = compared(files, model.config.model_type)
        lines += [f"{str(dtype).removeprefix('torch.')}: {line}" for line in differences(ours, theirs)]
        lines += [f"{name} is tied in the table, and stored" for name in sorted(tied & theirs.keys())]
        kept_names[dtype] = sorted(name for name, (_, to) in files.items() if to == "float32")
        tensors = len(files)
    return lines, kept_names, tensors


def report(found):
    models, types = sum(found.values()), len(found)
    text = (f"`samples/families/generate.py tables` with transformers {transformers.__version__}: the names, shapes, ties and "
            f"dtypes of {models} tiny models of {types} model types are those of the tables.")
    return "\n".join(textwrap.wrap(text, 120))


def tables(arguments):
    found, failures, samples = collections.Counter(), [], {}
    for name, (model_type, members) in tiny_models().items():
        if arguments.names and name not in arguments.names:
            continue
        model = make_tiny(model_type, members)
        lines, kept_names, _ = compare(model)
        failures += [f"{name}: {line}" for line in lines]
        found[model_type] += 1
        if any(kept_names[dtype] for dtype in NARROW):
            samples[name] = {str(dtype).removeprefix("torch."): kept_names[dtype] for dtype in NARROW}
    print("\n".join(failures) or report(found))
    if arguments.write and not failures:
        text = REPORT.read_text()
        begin, end = (text.index(mark) for mark in MARKS)
        REPORT.write_text(text[:begin] + MARKS[0] + "\n" + report(found) + "\n" + text[end:])
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(sample)}" for name, sample in sorted(samples.items()))
        SAMPLES.write_text("{\n" + rows + "\n}\n")
    return 1 if failures else 0


# ---- The order in which torch numbers parameters

def pattern_of(name):
    return re.sub(r"(?<![^.])\d+(?![^.])", "{}", name)


def merged(sequences):
    """Returns the distinct items of all sequences in an order consistent with each of them; None if there is none."""
    after = collections.defaultdict(set)
    for sequence in sequences:
        for a, b in zip(sequence, sequence[1:]):
            after[a].add(b)
    items, out = list(dict.fromkeys(x for sequence in sequences for x in sequence)), []
    while items:
        held = {b for a in items for b in after[a]}
        first = next((x for x in items if x not in held), None)
        if first is None:
            return None
        out.append(first)
        items.remove(first)
    return out


def sorted_by(patterns, names):
    """Sorts names like in_parameter_order (lib/model/parameter_order.h)."""
    places, opened = {}, []
    for number, pattern in enumerate(patterns):
        begins = [pattern[:m.start()] for m in re.finditer(r"\{\}", pattern)]
        runs = [opened[i][1] if i < len(opened) and opened[i][0] == begin else number for i, begin in enumerate(begins)]
        opened = list(zip(begins, runs))
        places[pattern] = number, runs

    def key(name):
        number, runs = places[pattern_of(name)]
        return [x for pair in zip(runs, map(int, re.findall(r"(?<![^.])\d+(?![^.])", name))) for x in pair] + [number]
    return sorted(names, key=key)


def blocks(names):
    """Returns the patterns before the layers, of each layer, and after the layers."""
    before_and_after = list(dict.fromkeys(map(pattern_of, names)))
    layers = collections.defaultdict(list)
    for name in names:
        if layer := re.match(r"(.*?\.\d+)\.", name):
            layers[layer[1]].append(pattern_of(name))
    return [before_and_after, *(list(dict.fromkeys(layer)) for layer in layers.values())]


def orders(arguments):
    found = collections.defaultdict(list)
    for model_type, members in tiny_models().values():
        model = make_tiny(model_type, members)
        names = [name for name, _ in model.named_parameters()]
        found[model_type].append((names, set(names) <= set(saved(model, torch.bfloat16))))
    rows = {}
    for model_type, models in sorted(found.items()):
        patterns = merged([list(dict.fromkeys(map(pattern_of, names))) for names, _ in models])
        patterns = merged([block for names, _ in models for block in blocks(names)]) if patterns is None else patterns
        if patterns and all(is_stored and sorted_by(patterns, names[::-1]) == names for names, is_stored in models):
            rows[model_type] = " ".join(patterns)
        else:
            print(f"{model_type}: other names in files, or no order by patterns", file=sys.stderr)
    text = json.dumps({"transformers": transformers.__version__, "orders": rows}, indent=1) + "\n"
    if arguments.check:
        return int(json.loads(text)["orders"] != json.loads(ORDERS.read_text())["orders"])
    ORDERS.write_text(text)
    return 0


# ---- Model types without a family

def described_types():
    """Returns the model types that families describe."""
    files = (json.loads(path.read_text()) for path in (ROOT / "samples/families").glob("*.json"))
    return {model_type for file in files for model_type in file.get("model_types", ())}


def by_type(path):
    """{model type: line} of a file of lines of JSON."""
    return {json.loads(line)["type"]: line for line in path.read_text().splitlines()} if path.exists() else {}


def architectures(arguments):
    lines, reports = by_type(ARCHITECTURES), by_type(DERIVATIONS)
    for model_type in [] if arguments.report else arguments.types or to_derive(reports, arguments.all):
        line, report = derivation.derive_type(model_type, derivation.chosen(own_classes(model_type)))
        reports[model_type] = text_of_report(model_type, report)
        print(reports[model_type], flush=True)
        lines.pop(model_type, None)
        if line:
            lines[model_type] = line
        ARCHITECTURES.write_text("".join(lines[t] + "\n" for t in sorted(lines)))
        DERIVATIONS.write_text("".join(reports[t] + "\n" for t in sorted(reports)))
    if not arguments.types:
        reports |= types_without_classes(reports)
        DERIVATIONS.write_text("".join(reports[t] + "\n" for t in sorted(reports)))
    write_report(ARCHITECTURE_MARKS, architectures_report(lines, reports, len(to_derive(reports))))
    return 0


def types_without_classes(reports):
    """{type: line of derivations.jsonl} of the types for which no auto class builds a model: most are parts of others."""
    owners, known = owners_of_parts(), described_types() | reports.keys()
    return {t: json.dumps({"type": t, "transformers": transformers.__version__, "part_of": sorted(owners[t])}, separators=(",", ":"))
            for t in model_types() if t not in known and not own_classes(t)}


def owners_of_parts():
    """{type of a part: types whose configs contain it}."""
    out = collections.defaultdict(set)
    for t in model_types():
        for part in getattr(configuration_auto.CONFIG_MAPPING[t], "sub_configs", {}).values():
            if getattr(part, "model_type", ""):  # AutoConfig has none
                out[part.model_type].add(t)
    return out


def to_derive(reports, all_types=False):
    """The types with classes of their own that no family describes and that are not derived yet."""
    done = set() if all_types else described_types() | reports.keys()
    return [t for t in model_types() if t not in done and own_classes(t)]


def text_of_report(model_type, report):
    kept_words = "class", "rows", "sizes", "unknown", "optional", "configs", "default", "why"
    classes = [{word: c[word] for word in kept_words if word in c} for c in report]
    return json.dumps({"type": model_type, "transformers": transformers.__version__, "classes": classes}, separators=(",", ":"))


OURS = "deriving", "its"  # how reasons begin that are not transformers' own


def reason(why):
    """Returns in a few words why a class was not derived."""
    library = re.search(r"requires the (\w+) library", why)
    if library:
        return f"needs {library[1]}"
    return why if why.startswith(OURS) else "transformers cannot build its default config"


def counted(types):
    return f"{len(types)} type{'' if len(types) == 1 else 's'}"


def architectures_report(lines, reports, untried):
    """Returns what docs/families.md says about the types that were tried."""
    every = {t: json.loads(report) for t, report in reports.items()}
    reports = {t: report["classes"] for t, report in every.items() if "classes" in report}
    others = [report for report in every.values() if "classes" not in report]
    classes = [c for t in lines for c in reports[t] if "rows" in c]
    sizes, unknown = sum(c["sizes"] for c in classes), sum(c["unknown"] for c in classes)
    text = (f"`generate.py architectures` with transformers {transformers.__version__}: {len(lines)} model types, {len(classes)} "
            f"classes. Formulas give {sizes - unknown:,} of {sizes:,} sizes; the rows hold for {derivation.CONFIRMATIONS} further random "
            f"configs of each class ({sum(c['configs'] == derivation.CONFIRMATIONS for c in classes)} classes) and for its default "
            f"({sum(c['default'] is True for c in classes)}).")
    out = textwrap.wrap(text, 120)
    refused = collections.defaultdict(list)
    for t, found in sorted(reports.items()):
        if not any("rows" in c for c in found):
            refused[reason(found[0]["why"])].append(t)
    if refused:
        named = (f"{', '.join(types) if why.startswith(OURS) else counted(types)} ({why})" for why, types in sorted(refused.items()))
        text = f"Not derived: {'; '.join(named)}."
        out += ["", *textwrap.wrap(text, 120)]
    if others:
        parts = sum(bool(report["part_of"]) for report in others)
        text = (f"No auto class of transformers builds {len(others)} further types; {parts} of them are parts of other types. "
                f"`samples/families/derivations.jsonl` has a line for each type.")
        out += ["", *textwrap.wrap(text, 120)]
    if untried:
        out += ["", f"Not tried yet: {untried} further types."]
    return "\n".join(out) + "\n"


def write_report(marks, text):
    before, _, rest = REPORT.read_text().partition(marks[0])
    REPORT.write_text(f"{before}{marks[0]}\n{text}{marks[1]}{rest.partition(marks[1])[2]}")


# Models with other entries in each list that has one for each stage.
STAGES = {"swin": {"embed_dim": 128, "depths": [1, 2, 3, 1], "num_heads": [4, 8, 16, 32]},
          "regnet": {"depths": [1, 2, 3, 1], "hidden_sizes": [24, 56, 152, 368], "groups_width": 8},
          "levit": {"depths": [2, 3, 1], "hidden_sizes": [192, 288, 384], "num_attention_heads": [3, 5, 6], "key_dim": [32, 32, 32]}}


SMALL = "moonshine", "sam_vision_model"  # whose small models have sizes that are rounded


def sample_of(model_type, cls):
    """(config, {name in files: shape}) of a model of a config that no derivation saw; None where transformers builds none."""
    if model_type not in STAGES:
        found = derivation.further_model(model_type, cls)
        return derivation.smaller(derivation.Builder(cls), found[0]) if found and model_type in SMALL else found
    config = transformers.AutoConfig.for_model(model_type, **STAGES[model_type])
    return config, derivation.Builder(cls)(config)


def samples(arguments):
    lines = []
    for model_type in arguments.types:
        for cls in derivation.chosen(classes_of(model_type))[:2]:
            found = sample_of(model_type, cls)
            if found:
                config, files = found
                config.architectures = [cls.__name__]
                files = {name.removeprefix(derivation.FILES): shape for name, shape in files.items()
                         if name[0] not in derivation.MEMORY + derivation.TIED}
                lines.append(json.dumps({"class": cls.__name__, "config": json.loads(config.to_json_string()), "files": files}))
    MODELS.write_text("\n".join(lines) + "\n")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("kept")
    command.add_argument("--check", action="store_true")
    command.add_argument("--quick", action="store_true")
    command.add_argument("types", nargs="*")
    command.set_defaults(run=kept)
    command = commands.add_parser("tables")
    command.add_argument("--write", action="store_true")
    command.add_argument("names", nargs="*")
    command.set_defaults(run=tables)
    command = commands.add_parser("orders")
    command.add_argument("--check", action="store_true")
    command.set_defaults(run=orders)
    command = commands.add_parser("transposed")
    command.add_argument("--check", action="store_true")
    command.set_defaults(run=transposed)
    command = commands.add_parser("architectures")
    command.add_argument("--all", action="store_true")
    command.add_argument("--report", action="store_true")
    command.add_argument("types", nargs="*")
    command.set_defaults(run=architectures)
    command = commands.add_parser("samples")
    command.add_argument("types", nargs="+")
    command.set_defaults(run=samples)
    arguments = parser.parse_args()
    sys.exit(arguments.run(arguments))


if __name__ == "__main__":
    main()

"""Derives the names and shapes of a model class from transformers, as formulas over its config.

A class is built at many configs on torch's meta device, without weights:
1. at its default config with few layers and experts, the base;
2. with each number or boolean of the config changed alone, which shows what depends on it;
3. again beside each change that adds tensors ("tie_word_embeddings": false adds a head);
4. with several changes at a time, drawn at random, which no formula may contradict.
Then each dimension, each count of numbered modules and each condition is the simplest formula that holds in all of them.
A dimension without a formula is "?", a parameter whose presence has no condition is optional, and a member of the config that
cannot be changed, or is no number, is fixed: the rows hold only for its default value.

The lines of architectures.jsonl are described in lib/model/architecture.h.
"""
import collections
import copy
import itertools
import json
import random
import re

import torch
import transformers

# Members that affect no tensor's name or shape.
HARMLESS = re.compile(
    r"(^|\.)(hidden_act|\w*_act|act_\w+|\w*activation|\w*activation_function|dtype|torch_dtype|model_type|_?name_or_path|architectures"
    r"|transformers_version|\w*attn_implementation\w*|experts_implementation|initializer_\w+|\w*_initializer_\w+|init_std|\w*_init_value"
    r"|\w*dropout|\w*dropout_\w+|\w*drop_path_rate|layerdrop|\w*_layerdrop|\w*_prob|\w*token_ids?|\w*_token_id|\w*token_index|\w*_eps|eps"
    r"|\w*epsilon|id2label|label2id|problem_type|finetuning_task|ctc_loss_reduction|ctc_zero_infinity|output_attentions"
    r"|output_hidden_states|output_past|return_dict|use_cache|is_decoder|is_encoder_decoder|rope_\w+|\w*_theta|attention_window"
    r"|sliding_window|use_sliding_window|max_window_layers|task_specific_params|summary_\w+|stage_names|out_features|out_indices"
    r"|image_mean|scale_embedding|\w*loss_weight|\w*loss_ignore_index|time_step_init_scheme|init_device|dense_act_fn|scale_decoder_outputs|gradient_checkpointing|mask_(time|feature)_\w+|apply_spec_augment|chunk_size_feed_forward|tokenizer_class|prefix"
    r"|begin_suppress_tokens|suppress_tokens|forced_\w+|\w*temperature|\w*softcap\w*|max_length|min_length)$")
# Parameters that files may lack: computed buffers, and parameters that depend on how the model was trained.
MAY_LACK = re.compile(r"(^|\.)(masked_spec_embed|final_logits_bias|position_ids|token_type_ids|embed_positions\.weight)$")
LAYER_TYPES = "layer_types", "mlp_layer_types", "layers_block_type"  # made anew of the number of layers
DEPTHS = re.compile(
    r"(num_hidden_layers|num_layers|n_layers?|(en|de)coder_layers|num_(en|de)coder_layers|num_blocks|num_hidden_groups|depth)$")
EXPERTS = re.compile(r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts)$")
FEW_LAYERS, FEW_EXPERTS = 3, 4
RANDOM_CONFIGS = 6
SECONDS = 20  # for one model
MAX_CLASSES = 6
HEADS = ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForPreTraining", "ForSequenceClassification",
         "ForImageClassification", "ForCTC", "ForTokenClassification", "ForQuestionAnswering", "ForObjectDetection")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)|(?<=\.)\d+$")


def chosen(classes):
    """Returns the classes of a type to derive: models without a head first, then those with the most common heads."""
    heads = [c for end in HEADS for c in classes if c.__name__.endswith(end)]
    bare = [c for c in classes if c not in heads and c.__name__.endswith("Model")][:2]
    return (bare + heads)[:MAX_CLASSES] or classes[:2]


# ---- configs

def members(config, prefix=""):
    """Returns {path: value} of a config and of its parts, which have a model_type of their own."""
    out = {}
    for key, value in config.items():
        if isinstance(value, dict):
            out.update(members(value, f"{prefix}{key}.") if "model_type" in value else {})
        else:
            out[prefix + key] = value
    return out


def place_of(config, path):
    *parts, last = path.split(".")
    for part in parts:
        config = config[part]
    return config, last


def put(config, path, value):
    place, last = place_of(config, path)
    place[last] = value


def remove(config, path):
    place, last = place_of(config, path)
    place.pop(last, None)


def is_number(value):
    return isinstance(value, int)  # booleans too


def changes_of(value):
    """Returns values to try instead of a given one."""
    if isinstance(value, bool):
        return [not value]
    if value == 0:
        return [1, 2, 4]
    if value < 8:
        return [value + 1, value + 2, value * 2, max(1, value - 1)]
    return [value * 2, value + 8, value + 1, value * 3, value // 2]


# ---- formulas

def terms(fields):
    """Yields (text, function of the values) for products and quotients, simple ones first."""
    out = [(f, lambda v, f=f: v[f]) for f in fields]
    for f, g in itertools.combinations(fields, 2):
        out.append((f"{f}*{g}", lambda v, f=f, g=g: v[f] * v[g]))
    for f, g in itertools.permutations(fields, 2):
        out.append((f"{f}/{g}", lambda v, f=f, g=g: v[f] // v[g] if v[g] else -1))
        out.append((f"{f}/{g}*{g}", lambda v, f=f, g=g: v[f] // v[g] * v[g] if v[g] else -1))
    for f in fields:
        out.append((f"{f}*{f}", lambda v, f=f: v[f] ** 2))
        out += [(f"{f}/{k}", lambda v, f=f, k=k: v[f] // k) for k in (2, 3, 4, 8)]
    for three in itertools.combinations(fields, 3):
        out.append(("*".join(three), lambda v, t=three: v[t[0]] * v[t[1]] * v[t[2]]))
    for f, g, h in itertools.permutations(fields, 3):
        if f < g:
            out.append((f"{f}*{g}/{h}", lambda v, f=f, g=g, h=h: v[f] * v[g] // v[h] if v[h] else -1))
    return out


def times(factor, term):
    return term if factor == 1 else f"{factor}*{term}"


def sums(known, results):
    """Yields formulas that are sums of terms with factors: a*x+c, a*x+b*y, x+y+c, a*x+b*y+c*z."""
    plain = [(t, x) for t, x in known if "/" not in t]
    for (t, x), k in itertools.product(plain, (1, 2, 3, 4, 6, 8)):
        c = results[0] - k * x[0]
        if 0 < c <= 512 and [k * n + c for n in x] == results:
            yield f"{times(k, t)}+{c}"
    for (t, x), (u, y) in itertools.combinations(known, 2):
        for a, b in itertools.product((1, 2, 3, 4), repeat=2):
            if (a > 1 and "/" in t) or (b > 1 and "/" in u):
                continue
            if [a * n + b * m for n, m in zip(x, y)] == results:
                yield f"{times(a, t)}+{times(b, u)}"
        c = results[0] - x[0] - y[0]
        if 0 < c <= 16 and [n + m + c for n, m in zip(x, y)] == results:
            yield f"{t}+{u}+{c}"
    if len(plain) < 40:
        for three in itertools.combinations(plain, 3):
            for factors in itertools.product((1, 2), repeat=3):
                if [sum(k * n for k, n in zip(factors, ns)) for ns in zip(*(x for _, x in three))] == results:
                    yield "+".join(times(k, t) for k, (t, _) in zip(factors, three))


def formula_of(fields, samples):
    """Returns a formula over these fields that holds in all samples, [(values, result)]; None if there is none."""
    results = [result for _, result in samples]
    if not fields:
        return str(results[0]) if len(set(results)) == 1 else None
    known = [(text, [function(values) for values, _ in samples]) for text, function in terms(fields)]
    known = [(text, x) for text, x in known if all(n > 0 for n in x)]
    for text, x in known:
        if x == results:
            return text
    for text, x in known:
        factor = results[0] // x[0]
        if "/" not in text and factor <= 64 and [factor * n for n in x] == results:
            return f"{factor}*{text}"
    return next(sums(known, results), None)


# ---- One class

def patterns_of(shapes):
    """Returns {name with {} for numbers: {numbers: shape}}."""
    out = collections.defaultdict(dict)
    for name, shape in shapes.items():
        out[NUMBER.sub("{}", name)][tuple(int(n) for n in NUMBER.findall(name))] = shape
    return dict(out)


class Derivation:
    """Derives the rows of a class. `shapes(config)` returns {name in files: shape}, or raises if it cannot be built."""

    def __init__(self, model_type, name, prefix, shapes):
        self.model_type, self.name, self.prefix, self.build = model_type, name, prefix, shapes
        self.random = random.Random(f"{model_type}/{name}")
        self.default = transformers.AutoConfig.for_model(model_type).to_dict()
        self.config_class = type(transformers.AutoConfig.for_model(model_type))
        self.samples = []  # (values, patterns)
        self.affected = collections.defaultdict(set)  # ("dim" or "count", pattern, which one): fields
        self.presence = collections.defaultdict(set)  # pattern: fields
        self.moves = {}  # field: values that make a model
        self.fixed = {}
        self.problem, self.builds, self.confirmed = "", 0, 0

    def start_from(self, config):
        self.base = config
        self.values = {path: v for path, v in members(config).items() if is_number(v)}
        return self.sample({})

    def small(self):
        config = copy.deepcopy(self.default)
        for path, value in members(self.default).items():
            if path.split(".")[-1] in LAYER_TYPES:
                remove(config, path)
            elif is_number(value) and value > FEW_LAYERS and DEPTHS.search(path):
                put(config, path, FEW_LAYERS)
            elif is_number(value) and value > FEW_EXPERTS and EXPERTS.search(path):
                put(config, path, FEW_EXPERTS)
        return config

    def sample(self, changed):
        config = copy.deepcopy(self.base)
        for path, value in changed.items():
            put(config, path, value)
        config.pop("model_type", None)
        self.builds += 1
        try:
            shapes = self.build(self.config_class(**config))
        except Exception as e:  # the config describes no model
            self.problem = f"{type(e).__name__}: {str(e)[:80]}"
            return None
        return {**self.values, **changed}, patterns_of(shapes)

    def compare(self, before, after, field):
        """Records which shapes a change of the field affects. Returns whether it affects any."""
        changed = False
        for pattern in before.keys() | after.keys():
            a, b = before.get(pattern), after.get(pattern)
            if a is None or b is None:
                self.presence[pattern].add(field)
                changed = True
                continue
            for k in range(pattern.count("{}")):
                if len({i[k] for i in a}) != len({i[k] for i in b}):
                    self.affected["count", pattern, k].add(field)
                    changed = True
            for numbers in a.keys() & b.keys():
                for d, (x, y) in enumerate(zip(a[numbers], b[numbers])):
                    if x != y:
                        self.affected["dim", pattern, d].add(field)
                        changed = True
        return changed

    def change_each(self, base):
        for field, value in self.values.items():
            if HARMLESS.search(field):
                continue
            for to in changes_of(value):
                sample = self.sample({field: to})
                if sample is None:
                    continue
                self.moves.setdefault(field, []).append(to)
                self.samples.append(sample)
                if not self.compare(base[1], sample[1], field) or len(self.moves[field]) == 2 or isinstance(value, bool):
                    break
            if field not in self.moves and value:
                self.fixed[field] = members(self.default).get(field)

    def change_beside_additions(self, base):
        contexts = {}
        for values, found in self.samples[1:]:
            change = {f: v for f, v in values.items() if v != self.values[f]}
            added = frozenset(found.keys() - base[1].keys())
            if len(change) == 1 and added and not any(added <= other for other in contexts.values()):
                contexts[tuple(change.items())] = added
        movable = [f for f in self.moves if any(f in fields for fields in self.affected.values())]
        for context, added in contexts.items():
            there = self.sample(dict(context))
            for field in movable:
                sample = field not in dict(context) and self.sample({**dict(context), field: self.moves[field][-1]})
                if sample:
                    self.samples.append(sample)
                    only = [{p: x for p, x in s[1].items() if p in added} for s in (there, sample)]
                    self.compare(*only, field)

    def fix_others(self, base):
        for path, value in members(self.default).items():
            if is_number(value) or HARMLESS.search(path) or value in (None, []) or path.split(".")[-1] in LAYER_TYPES:
                continue
            if isinstance(value, float):
                sample = self.sample({path: value * 2})
                if sample and sample[1] == base[1]:
                    continue
            self.fixed[path] = value

    def confirm(self):
        used = set().union(*self.affected.values(), *self.presence.values())
        fields = [f for f in self.moves if f in used]
        for _ in range(7 * RANDOM_CONFIGS):
            if self.confirmed == RANDOM_CONFIGS or not fields:
                return
            some = self.random.sample(fields, min(len(fields), self.random.randint(2, 6)))
            sample = self.sample({f: self.random.choice(self.moves[f]) for f in some})
            if sample:
                self.samples.append(sample)
                self.confirmed += 1

    def derive(self):
        """Returns whether the class could be built."""
        base = self.start_from(self.small()) or self.start_from(copy.deepcopy(self.default))
        if not base:
            return False
        self.samples.append(base)
        self.change_each(base)
        self.change_beside_additions(base)
        self.fix_others(base)
        self.confirm()
        return True

    # rows

    def when(self, pattern):
        if MAY_LACK.search(pattern):
            return "?"
        present = [(values, pattern in found) for values, found in self.samples]
        if all(is_there for _, is_there in present):
            return ""
        for field in sorted(self.presence[pattern]):
            if all(bool(values[field]) == is_there for values, is_there in present):
                return field
            if all(bool(values[field]) != is_there for values, is_there in present):
                return "!" + field
        return "?"

    def dims(self, pattern, there):
        """Returns formulas for [(values, [shapes])]; None if the rank changes."""
        shapes = [shape for _, shapes in there for shape in shapes]
        if len({len(shape) for shape in shapes}) != 1:
            return None
        out = []
        for d in range(len(shapes[0])):
            alike = all(len({shape[d] for shape in shapes}) == 1 for _, shapes in there)
            fields = sorted(self.affected["dim", pattern, d])
            out.append((alike and formula_of(fields, [(v, shapes[0][d]) for v, shapes in there])) or "?")
        return out

    def rows_of(self, pattern):
        """Returns the rows of a pattern. Numbers that are equal in all samples are part of the names."""
        there = [(values, found[pattern]) for values, found in self.samples if pattern in found]
        places = range(pattern.count("{}"))
        literal = [k for k in places if len({frozenset(i[k] for i in found) for _, found in there}) == 1]
        counted = [k for k in places if k not in literal]
        for numbers in sorted({tuple(i[k] for k in literal) for _, found in there for i in found}):
            parts = pattern.split("{}")
            words = {k: str(n) for k, n in zip(literal, numbers)}
            name = parts[0] + "".join(words.get(k, "{}") + part for k, part in enumerate(parts[1:]))
            own = [(values, {i: x for i, x in found.items() if tuple(i[k] for k in literal) == numbers}) for values, found in there]
            yield name, *self.row_of(pattern, counted, [(values, found) for values, found in own if found], len(there))

    def row_of(self, pattern, counted, there, samples):
        """Returns the dimensions, counts and condition for [(values, {numbers: shape})]."""
        counts, is_whole = [], len(there) == samples
        for k in counted:
            fields = sorted(self.affected["count", pattern, k])
            counts.append(formula_of(fields, [(values, max(i[k] for i in found) + 1) for values, found in there]))
        for _, found in there:
            product = 1
            for k in counted:
                product *= max(i[k] for i in found) + 1
            is_whole = is_whole and product == len(found)
        dims = self.dims(pattern, [(values, list(found.values())) for values, found in there])
        return dims, None if None in counts else counts, self.when(pattern) if is_whole else "?"

    def rows(self):
        """Returns the rows as text, and the names that could not be derived."""
        rows, failed = [], []
        for pattern in sorted({p for _, found in self.samples for p in found}):
            for name, dims, counts, when in self.rows_of(pattern):
                if dims is None or counts is None:
                    failed.append(name)
                else:
                    rows.append("|".join([name, ",".join(dims), ",".join(counts), when]))
        return rows, failed

    def defaults(self, rows):
        used = {word for row in rows for word in re.findall(r"[A-Za-z_][\w.]*", row.partition("|")[2])}
        default = members(self.default)
        return {f: int(default[f]) for f in sorted(used) if is_number(default.get(f))}


def further_model(model_type, cls, build):
    """Returns (config, {name in files: shape}) of a model with few layers and with three values that no derivation used;
    None if transformers cannot build one."""
    d = Derivation(model_type, cls.__name__, cls.base_model_prefix, build)
    draw = random.Random(f"further {model_type}/{cls.__name__}")
    base = d.start_from(d.small())
    if not base:
        return None
    fields = [f for f, v in d.values.items() if not HARMLESS.search(f) and v and not isinstance(v, bool)]
    for _ in range(20):
        config = copy.deepcopy(d.base)
        for field in draw.sample(fields, min(3, len(fields))):
            put(config, field, d.values[field] * 2 if d.values[field] > 8 else d.values[field] + 1)
        config.pop("model_type", None)
        try:
            made = d.config_class(**config)
            shapes = build(made)
        except Exception:  # the config describes no model
            continue
        if shapes and patterns_of(shapes) != base[1]:
            return made, shapes
    return None


# ---- One model type

def line_of(model_type, derivations):
    """Returns the line of a type in architectures.jsonl."""
    prefix = next((d.prefix + "." for d in derivations if d.prefix), "")
    owners = collections.defaultdict(list)  # (whether it is the base's, row): classes
    defaults, fixed = {}, {}
    for i, d in enumerate(derivations):
        rows, _ = d.rows()
        has_prefix = any(row.startswith(prefix) for row in rows)
        for row in rows:
            is_base = bool(prefix) and (row.startswith(prefix) or not has_prefix)
            owners[is_base, row.removeprefix(prefix) if is_base else row].append(i)
        defaults.update(d.defaults(rows))
        fixed.update(d.fixed)
    groups = collections.defaultdict(list)
    for (is_base, row), classes in owners.items():
        groups[is_base, tuple(classes)].append(row)
    parts = {word: [{"in": list(classes), "rows": sorted(rows)} for (b, classes), rows in sorted(groups.items()) if b == is_base]
             for word, is_base in (("base", True), ("own", False))}
    return json.dumps({"type": model_type, "prefix": prefix, "transformers": transformers.__version__,
                       "classes": [d.name for d in derivations], "defaults": defaults, "fixed": fixed, **parts})


def derive_type(model_type, classes, build):
    """Returns the line of a type, or None, and a report. `build(cls, config)` returns {name in files: shape}."""
    made, report = [], []
    for cls in chosen(classes):
        d = Derivation(model_type, cls.__name__, cls.base_model_prefix, lambda config, cls=cls: build(cls, config))
        if not d.derive():
            report.append(f"{model_type}: {cls.__name__}: not derived: {d.problem}")
            continue
        rows, failed = d.rows()
        made.append(d)
        report.append(f"{model_type}: {cls.__name__}: {len(rows)} names, {len(failed)} not derived, "
                      f"confirmed on {d.confirmed} random configs of {d.builds}")
    return line_of(model_type, made) if made else None, report

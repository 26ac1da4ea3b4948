"""Derives the names and shapes of a model class from transformers, as formulas over its config.

A class is built at many configs on torch's meta device, without weights:
1. at its default config with few layers and experts, the base;
2. with each member of the config changed alone, which shows what depends on it;
3. as in 2, together with each change that adds tensors ("tie_word_embeddings": false adds a head) or that gives a number
   which the default leaves out, and each change that removes tensors with more layers;
4. with several changes at a time, drawn at random. A config that contradicts the rows joins the samples and the rows are
   derived again, until the rows hold for CONFIRMATIONS configs in a row that no derivation has seen;
5. at its whole default config.
Each dimension, count of numbered modules and condition is the simplest formula that holds in all samples. A dimension without
a formula is "?", and a parameter whose presence has no condition is optional. A member of the config that changes the model in
a way no formula describes is fixed: the rows hold only for its default value.

The lines of architectures.jsonl are described in lib/model/architecture.h.

As a program: architectures.py DIR TABLE. Executes the code that DIR/config.json names in its auto_map, and writes the line of
its classes to TABLE. `reshard family` runs it.
"""
import collections
import contextlib
import copy
import functools
import gc
import itertools
import json
import os
import pathlib
import random
import re
import signal
import sys

try:
    import huggingface_hub.errors
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.modeling_utils import remove_tied_weights_from_state_dict
except ImportError as e:
    sys.exit(f"{sys.executable} needs torch and transformers 5: {e}")

# Members that change no tensor's name or shape.
HARMLESS = re.compile(
    r"(^|\.)(hidden_act|\w*_act|act_\w+|\w*activation|\w*activation_function|dtype|torch_dtype|model_type|_?name_or_path|architectures"
    r"|transformers_version|\w*attn_implementation\w*|experts_implementation|initializer_\w+|\w*_initializer_\w+|init_std|\w*_init_value"
    r"|\w*dropout|\w*dropout_\w+|\w*drop_path_rate|layerdrop|\w*_layerdrop|\w*_prob|\w*token_ids?|\w*_token_id|\w*token_index|\w*_eps|eps"
    r"|\w*epsilon|id2label|label2id|problem_type|finetuning_task|ctc_loss_reduction|ctc_zero_infinity|output_attentions"
    r"|auto_map|output_hidden_states|output_past|return_dict|use_cache|is_decoder|is_encoder_decoder|rope_\w+|\w*_theta|attention_window"
    r"|sliding_window|use_sliding_window|max_window_layers|task_specific_params|summary_\w+|stage_names|out_features|out_indices"
    r"|image_mean|image_std|scale_embedding|\w*loss_weight|\w*loss_ignore_index|time_step_init_scheme|init_device|dense_act_fn"
    r"|scale_decoder_outputs|gradient_checkpointing|mask_(time|feature)_\w+|apply_spec_augment|chunk_size_feed_forward"
    r"|tokenizer_class|prefix|begin_suppress_tokens|suppress_tokens|forced_\w+|\w*temperature|\w*softcap\w*|max_length|min_length"
    r"|\w*_coef|\w*_cost|\w*_coefficient|logits_scaling|\w*_multipliers?|router_dtype|router_jitter_noise|scoring_func|topk_method"
    r"|num_experts_per_tok|moe_topk|norm_topk_prob|topk_group|n_group|\w*_scaling|\w*_scaling_factor|pad_mode|\w*padding_idx"
    r"|residual_scale\w*|is_causal|use_mems_\w+|mem_len|clamp_len|same_length|reuse_len|bi_data|quantization_config"
    r"|output_(\w*attentions|\w*hidden_states|\w*logits|stride|retrieved|multiplier))$")
# Parameters that files may lack: buffers that are computed, and what depends on the training.
MAY_LACK = re.compile(r"(^|\.)(masked_spec_embed|final_logits_bias|position_ids|token_type_ids|embed_positions\.weight"
                      r"|num_batches_tracked|inv_freq|attn\.masked_bias)$")
OPAQUE = re.compile(r"(^|\.)(id2label|label2id|rope_\w+|quantization_config|task_specific_params|per_layer_config|auto_map)$")  # dicts
DEPTHS = re.compile(
    r"(^|\.)(num_hidden_layers|num_layers|n_layers?|n_enc|n_dec|(en|de)coder_layers|num_(en|de)coder_layers|num_blocks"
    r"|num_hidden_groups|depth|\w*_num_hidden_layers|\w+_depth|layers)$")
STAGE_DEPTHS = re.compile(r"(^|\.)\w*(depths|layers|blocks)\.\d+$")  # elements of lists
KINDS = "full_attention", "sliding_attention", "linear_attention", "chunked_attention"  # of layers
EXPERTS = re.compile(r"(^|\.)(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts)$")
# Numbers that a config may lack; a class then has a rule for them.
NUMBERS = re.compile(r"(^|\.)(num|n)_\w+$|_(size|dim|rank|heads|layers|channels|width|length|groups)$")
# Lists of the layers of a kind that a config may lack; there are none then.
LAYER_LISTS = re.compile(r"(^|\.)(\w+_layer_(indices|ids)|mlp_only_layers)$")
NEEDED = re.compile(r"(^|\.)(vocab_size|pad_token_id|mask_token_id|num_labels)$")
FEW_LAYERS, MORE_LAYERS, FEW_EXPERTS = 2, 6, 4
LONGEST_LIST = 8  # of sizes per stage
MOST_NUMBERS = 64
SMALLEST_SIZE = 16  # of a constant that may be a member's value
FACTORS = re.compile(r"head|(layers|depth)$")  # members that multiply others
LARGE = 64  # larger numbers are made smaller in a small model
CONFIRMATIONS = 6
ATTEMPTS = 3
LONGER = 3  # lists of members to try with one more
FEWEST_RESULTS = 4  # that tell a further member from a coincidence
ODDS = 0, 0, 0, 0, 0, 0, 0, 2
SECONDS = 20  # for one model
MOST_SECONDS = 240  # of processor time for one class
MAX_CLASSES, MAX_OWN_CLASSES, MAX_CONTEXTS = 3, 8, 4
HEADS = ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForPreTraining", "ForSequenceClassification",
         "ForImageClassification", "ForCTC", "ForTokenClassification", "ForQuestionAnswering", "ForObjectDetection")
SHARED_HEADS = "transformers.modeling_layers"  # GenericForSequenceClassification and its like
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)|(?<=\.)\d+$")
# Prefixes of names that exist only in files, only in memory, or only in memory because they are tied to another tensor.
FILES, MEMORY, TIED = "<", ">", "~"


def chosen(classes):
    """Those of a type that are derived: the model without a head first, then the most common heads."""
    heads = [c for end in HEADS for c in classes if c.__name__.endswith(end)]
    bare = [c for c in classes if c not in heads and c.__name__.endswith("Model")]
    bare.sort(key=lambda c: (c.__name__.endswith("EncoderModel"), len(c.__name__)))
    encoders = [c for c in bare[1:] if c.__name__.endswith("EncoderModel")]
    return (bare[:1] + encoders[:1] + heads)[:MAX_CLASSES + len(encoders[:1])] or classes[:2]


@contextlib.contextmanager
def made_as(dtype, seconds):
    """Builds models on the meta device in this dtype. Fails if a model takes more than some seconds."""
    def too_long(*_):
        raise TimeoutError(f"no model after {seconds} s")
    before = signal.signal(signal.SIGALRM, too_long), torch.get_default_dtype()
    signal.alarm(seconds)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        signal.alarm(0)
        torch.set_default_dtype(before[1])
        signal.signal(signal.SIGALRM, before[0])


class TooLong(BaseException):
    """Not an Exception, because configs that make no model raise those."""


@contextlib.contextmanager
def within(seconds):
    """Raises TooLong if the code takes more processor time. Garbage is not collected meanwhile but by the code itself."""
    def stop(*_):
        raise TooLong
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def without_initialization():
    """Models are made faster: their values do not matter."""
    names = [n for n in dir(torch.nn.init) if n.endswith("_") and not n.startswith("_")]
    before = {n: getattr(torch.nn.init, n) for n in names}
    for n in names:
        setattr(torch.nn.init, n, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        for n, function in before.items():
            setattr(torch.nn.init, n, function)


# ---- models without weights

class Builder:
    """Gives {name: shape} of a model of a config. A name that stands only in files, only in memory, or in memory for what
    another name stands for in files begins with a mark (architectures.py)."""

    def __init__(self, cls):
        self.cls, self.model, self.calls, self.is_plain = cls, None, 0, True

    def __call__(self, config):
        with made_as(torch.bfloat16, SECONDS), without_initialization():
            self.model = model = self.cls(config)
        memory = model.state_dict()
        kept = remove_tied_weights_from_state_dict(memory, model)
        files = self.in_files(model, kept)
        shape = {name: list(tensor.shape) for name, tensor in files.items()}
        out = {}
        for name, tensor in memory.items():
            if shape.get(name) != list(tensor.shape):
                out[(MEMORY if name in kept else TIED) + name] = list(tensor.shape)
        for name, sizes in shape.items():
            is_same = name in memory and list(memory[name].shape) == sizes
            out[name if is_same else FILES + name] = sizes
        return out

    def in_files(self, model, kept):
        """What files have for these tensors. A class whose first models are saved as they are is asked now and then."""
        self.calls += 1
        if self.is_plain and self.calls > 2 and self.calls % 8:
            return kept
        files = revert_weight_conversion(model, dict(kept))
        self.is_plain &= files.keys() == kept.keys() and all(files[n].shape == kept[n].shape for n in kept)
        return files

    def source(self):
        """The code of the modules that the model is made of, and of the heads that many models share."""
        names = {type(module).__module__ for module in self.model.modules()}
        names |= {base.__module__ for base in type(self.model).__mro__} & {SHARED_HEADS}
        names = {name for name in names if not name.startswith("torch.")}
        return "\n".join(pathlib.Path(sys.modules[name].__file__).read_text() for name in sorted(names))


# ---- configs

def members(config, prefix=""):
    """{path: value} of a config and of its parts; short lists of numbers also by element, "depths.0"."""
    out = {}
    for key, value in config.items():
        path = prefix + str(key)
        if key == "id2label" and isinstance(value, dict):
            out[path + ".#"] = len(value)
        elif isinstance(value, dict):
            out.update({} if OPAQUE.search(path) else members(value, path + "."))
        else:
            out[path] = int(value) if isinstance(value, float) and value.is_integer() else value
            if is_sizes(value):
                out.update({f"{path}.{i}": n for i, n in enumerate(value)})
    return out


def layers_numbers(config, part=""):
    """Yields (path, value) of what single layers have otherwise (per_layer_config), as members of the part."""
    for key, value in config.items():
        if key == "per_layer_config" and isinstance(value, dict):
            yield from ((part + k, n) for layer in value.values() if isinstance(layer, dict) for k, n in layer.items())
        elif isinstance(value, dict):
            yield from layers_numbers(value, f"{part}{key}.")


def is_sizes(value):
    return isinstance(value, (list, tuple)) and 0 < len(value) <= LONGEST_LIST and all(type(n) is int for n in value)


def place_of(config, path):
    *parts, last = path.split(".")
    for part in parts:
        config = config[int(part) if isinstance(config, list) else part]
    return config, int(last) if isinstance(config, list) else last


def put(config, path, value):
    if path.endswith("id2label.#"):
        config, _ = place_of(config, path.removesuffix(".id2label.#")) if "." in path.removesuffix(".#") else (config, None)
        config.update(id2label={i: f"LABEL_{i}" for i in range(value)}, label2id={f"LABEL_{i}": i for i in range(value)})
        return
    place, last = place_of(config, path)
    place[last] = value


def as_lists(value):
    if isinstance(value, dict):
        return {k: as_lists(v) for k, v in value.items()}
    return [as_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


def is_number(value):
    return isinstance(value, int)  # booleans too


def changes_of(value):
    """Numbers to try in place of one."""
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [4, 8, 48, 1]
    if value == 0:
        return [1, 2, 4]
    if value < 8:
        return [value + 1, value + 2, value * 2, max(1, value - 1)]
    return [value * 2, value + 8, value + 1, value * 3, value // 2]


# ---- formulas, evaluated as lib/model/formula.h does

TOKEN = re.compile(r"[+\-*/:^]|[^+\-*/:^]+")


@functools.lru_cache(maxsize=1 << 20)
def tokens_of(formula):
    """The tokens of each alternative; numbers as numbers."""
    return tuple(tuple(int(t) if t.isdigit() else t for t in TOKEN.findall(a)) for a in formula.split(";"))


def evaluate(formula, number_of):
    """The value, or None if a name has none. Alternatives are separated by ";"."""
    for tokens in tokens_of(formula):
        total, product, sign = 0, 0, "+"
        for token in tokens:
            if token.__class__ is str and token in "+-*/:^":
                sign = token
                continue
            n = token if token.__class__ is int else number_of(token)
            if not is_number(n) or (sign in "/:" and n == 0):
                break
            if sign in "+-":
                total, product = total + product, n if sign == "+" else -n
            elif sign == "*":
                product *= n
            elif sign == "^":
                product **= n
            else:
                product = product // n if sign == "/" else -(-product // n)
        else:
            return total + product
    return None


@functools.lru_cache(maxsize=4096)
def terms(fields):
    """Texts of products and quotients of the fields, simple ones first."""
    out = list(fields)
    out += [f"{f}*{g}" for f, g in itertools.combinations(fields, 2)]
    out += [f"{f}/{g}" for f, g in itertools.permutations(fields, 2)]
    out += [f"{f}*{f}" for f in fields]
    out += [f"{f}/{k}" for f in fields for k in (2, 3, 4, 8, 16, 32)]
    out += [f"{f}:{g}" for f, g in itertools.permutations(fields, 2)]
    out += [f"{f}/{g}*{g}" for f, g in itertools.permutations(fields, 2)]
    out += ["*".join(three) for three in itertools.combinations(fields, 3)]
    out += [f"{f}*{g}/{h}" for f, g, h in itertools.permutations(fields, 3) if f < g]
    out += [f"{f}/{g}*{h}" for f, g, h in itertools.permutations(fields, 3)]
    out += [f"{f}/{g}/{h}" for f, g, h in itertools.permutations(fields, 3) if g < h]
    out += [f"{f}*{g}/{k}" for f, g in itertools.combinations(fields, 2) for k in (2, 3, 4, 8)]
    out += [f"{f}:{k}" for f in fields for k in (2, 3, 4, 8, 16)]
    out += [f"{f}/{g}^2" for f, g in itertools.permutations(fields, 2)]
    out += [f"{f}/{k}^2" for f in fields for k in (2, 4, 8, 14, 16, 32)]
    out += [f"{f}/{g}*{h}/{g}" for f, g, h in itertools.permutations(fields, 3) if f < h]
    out += [f"{f}/{k}*{k}" for f in fields for k in (2, 4, 8, 16)]
    out += [f"{f}*{f}*{g}" for f, g in itertools.permutations(fields, 2)]
    out += [f"{f}*{f}/{g}" for f, g in itertools.permutations(fields, 2)]
    out += ["*".join(four) for four in itertools.combinations(fields, 4)]
    return tuple(out)


def times(factor, term):
    """A term times a number, which comes last where the term is a quotient that is rounded first."""
    return term if factor == 1 else f"{term}*{factor}" if re.search("[/:]", term) else f"{factor}*{term}"


def with_constant(text, c):
    return text if c == 0 else f"{text}+{c}" if c > 0 else f"{text}-{-c}"


def sums(known, results):
    """Formulas that are sums of terms with factors: a*x+c, a*x+b*y+c, x+y+z."""
    plain = [(t, x) for t, x in known if "/" not in t and ":" not in t]
    for t, x in known:
        for k in 1, 2, 3, 4, 6, 8:
            c = results[0] - k * x[0]
            if c != 0 and -16 <= c <= 4096 and all(k * n + c == r for n, r in zip(x, results)):
                yield with_constant(times(k, t), c)
    by_differences = {}
    for t, x in known:
        by_differences.setdefault(tuple(n - x[0] for n in x), []).append((t, x))
    for t, x in known[:400]:
        for a in (1, 2, 3, 4, 6, 8) if "/" not in t and ":" not in t else (1,):
            for b in (1, 2, 3, 4):
                rest = [r - a * n for n, r in zip(x, results)]
                differences = tuple(n - rest[0] for n in rest)
                if any(d % b for d in differences):
                    continue
                for u, y in by_differences.get(tuple(d // b for d in differences), ()):
                    c = rest[0] - b * y[0]
                    if (b == 1 or ("/" not in u and ":" not in u)) and -8 <= c <= 64 and t != u and are_enough(t, u, results):
                        yield with_constant(f"{times(a, t)}+{times(b, u)}", c)
    if len(plain) < 60:
        for three in itertools.combinations(plain, 3):
            for factors in itertools.product((1, 2), repeat=3):
                if all(sum(k * n for k, n in zip(factors, ns)) == r for r, *ns in zip(results, *(x for _, x in three))):
                    yield "+".join(times(k, t) for k, (t, _) in zip(factors, three))


def are_enough(t, u, results):
    """Whether a sum of two terms is more than a coincidence: of one member it holds for any three numbers."""
    return len(results) > 3 or len(used_in([t, u])) > 1


def search(fields, values, results):
    known = []
    for text in terms(tuple(fields)):
        x = [evaluate(text, v.get) for v in values]
        if all(n is not None and n > 0 for n in x):
            if x == results:
                return text
            known.append((text, x))
    for text, x in known:
        factor = results[0] // x[0]
        if "/" not in text and ":" not in text and 1 < factor <= 4096 and all(factor * n == r for n, r in zip(x, results)):
            return f"{factor}*{text}"
        if "/" in text and 1 < factor <= 8 and all(n * factor == r for n, r in zip(x, results)):
            return f"{text}*{factor}"
    return next(sums(known, results), None)


def formula_of(fields, samples):
    """The formula over these fields that holds in all samples, [(values, result)]; None if there is none."""
    unique = results_by(fields, samples)
    return unique and formula_of_values(tuple(fields), tuple(unique.items()))


def results_by(fields, samples):
    """{numbers of the fields: result} of the samples; None if the result depends on other members."""
    unique = {}
    for values, result in samples:
        key = tuple(values.get(f) if is_number(values.get(f)) else None for f in fields)
        if unique.setdefault(key, result) != result:
            return None
    return unique


@functools.lru_cache(maxsize=65536)
def formula_of_values(fields, samples):
    results = [result for _, result in samples]
    if len(set(results)) == 1:
        return str(results[0])
    given = [f for i, f in enumerate(fields) if all(key[i] is not None for key, _ in samples)]
    if len(given) < len(fields):  # a rule for configs that give a number, and one for those that do not
        lacking = next(f for f in fields if f not in given)
        k = fields.index(lacking)
        with_it = formula_of_values(fields, tuple(s for s in samples if s[0][k] is not None))
        others = fields[:k] + fields[k + 1:]
        without = formula_of(others, [(dict(zip(fields, key)), r) for key, r in samples if key[k] is None])
        uses_it = with_it and lacking in TOKEN.findall(with_it)
        return f"{with_it};{without}" if uses_it and without and ";" not in with_it + without else None
    if len(fields) > 6:
        return None
    return search(fields, [dict(zip(fields, key)) for key, _ in samples], results)


# ---- conditions, evaluated as lib/model/architecture.h says

def holds(condition, values, number=None):
    """Whether a condition holds for the number of the first {}; None if a member that it needs is not given."""
    if condition in ("", "?"):
        return True
    return any_of(all_of(atom_holds(atom, values, number) for atom in group.split("&")) for group in condition.split(";"))


def all_of(results):
    results = list(results)
    return False if False in results else None if None in results else True


def any_of(results):
    results = list(results)
    return True if True in results else None if None in results else False


@functools.lru_cache(maxsize=1 << 20)
def parts_of(atom):
    parts = re.fullmatch(r"(.*?)([=<@%])(.*)", atom)
    return parts and parts.groups()


def atom_holds(atom, values, number):
    if atom.startswith("!"):
        result = atom_holds(atom[1:], values, number)
        return None if result is None else not result
    parts = parts_of(atom)
    if not parts:
        value = listed(atom, values, number)
        return None if value is None else bool(value)
    left, operation, right = parts
    if operation == "@":
        members = values.get(right, ...)
        return number in (members or []) if members is None or isinstance(members, list) else None
    if operation == "%":
        divisor, _, rest = right.partition("=")
        n = evaluate(divisor, values.get)
        return None if not n else number % n == evaluate(rest, values.get)
    if right.startswith("'"):
        value = listed(left, values, number)
        return None if value is None else value == right[1:-1]
    a = number if left == "#" else listed(left, values, number)
    b = evaluate(right, values.get)
    if not is_number(a) or b is None:
        return None
    return a == b if operation == "=" else a < b


def listed(name, values, number):
    """The value of a member, or of the element of a list: "layer_types[#]"."""
    if not name.endswith("[#]"):
        return values.get(name)
    members = values.get(name[:-3])
    return members[number] if isinstance(members, list) and number < len(members) else None


def literal(value):
    return f"'{value}'" if isinstance(value, str) else str(int(value))


# ---- samples

def patterns_of(shapes):
    """{name with {} for numbers: {numbers: shape}}."""
    out = collections.defaultdict(dict)
    for name, shape in shapes.items():
        out[NUMBER.sub("{}", name)][tuple(int(n) for n in NUMBER.findall(name))] = shape
    return dict(out)


class Sample:
    """A config as a file has it, and the tensors of its model."""

    def __init__(self, made, shapes):
        self.made, self.values, self.shapes = made, members(as_lists(made.to_dict())), shapes
        self.patterns = patterns_of(shapes)

    @property
    def kinds(self):
        """The patterns, each with its numbers of dimensions."""
        return {(pattern, len(shape)) for pattern, found in self.patterns.items() for shape in found.values()}

    @functools.cached_property
    def numbers(self):
        """{(pattern up to a number, numbers before it): numbers}, of all names."""
        out = collections.defaultdict(set)
        for pattern, found in self.patterns.items():
            parts = pattern.split("{}")
            for k in range(len(parts) - 1):
                begin = "{}".join(parts[:k + 1]).lstrip(FILES + MEMORY + TIED)
                for numbers in found:
                    out[begin, numbers[:k]].add(numbers[k])
        return out


Row = collections.namedtuple("Row", "name dims counts when")


class Derivation:
    """`shapes(config)` gives {name: shape} of the class; it raises where it cannot be built."""

    def __init__(self, model_type, name, prefix, shapes, default=None, further=()):
        self.model_type, self.name, self.prefix, self.build = model_type, name, prefix, shapes
        self.others = [as_lists(config.to_dict()) for config in further]
        self.random = random.Random(f"{model_type}/{name}")
        made = default or transformers.AutoConfig.for_model(model_type)
        self.default, self.config_class = as_lists(made.to_dict()), type(made)
        self.samples, self.pairs = [], []  # pairs: (sample, sample with one more change, the changed member)
        self.moves, self.joint = {}, []  # member: values that make a model; several together
        self.fixed, self.computed, self.conditions = {}, {}, {}
        self.problem, self.builds, self.confirmed, self.holds_for_default = "", 0, 0, None
        self.caught = {}

    def try_config(self, config):
        config = copy.deepcopy(config)
        config.pop("model_type", None)
        self.builds += 1
        if self.builds % 20 == 0:
            gc.collect()
        try:
            made = self.config_class(**config)
            shapes = self.build(made)
        except Exception as e:  # the config describes no model
            self.problem = f"{type(e).__name__}: {' '.join(str(e).split())[:100]}"
            return None
        return Sample(made, shapes)

    def sample(self, changed):
        config = copy.deepcopy(self.base)
        for path, value in changed.items():
            try:
                put(config, path, float(value) if self.is_real(path) else value)
            except IndexError:  # an entry of a list that another change has shortened
                return None
            if DEPTHS.search(path):
                self.resize_lists(config, path, value)
        return self.try_config(config)

    def is_real(self, path):
        """Whether a member is a float, if a whole one."""
        try:
            place, last = place_of(self.base, path.removesuffix(".#"))
            return isinstance(place[last], float)
        except (KeyError, IndexError, TypeError):  # which the config leaves out
            return False

    def resize_lists(self, config, depth, layers):
        """Repeats or cuts the lists that have an entry for each layer."""
        part = depth.rpartition(".")[0]
        for path, value in self.values.items():
            if path.rpartition(".")[0] == part and isinstance(value, list) and self.is_per_layer(path, depth):
                place, last = place_of(config, path)
                place[last] = list(itertools.islice(itertools.cycle(place[last]), layers))

    def small(self, layers):
        """The default config with few layers and experts. Lists with an entry for each layer keep one of each kind."""
        config = copy.deepcopy(self.default)
        depths = {}
        for path, value in members(self.default).items():
            if isinstance(value, bool) or not is_number(value):
                continue
            if value > layers and DEPTHS.search(path) and not self.counts_stages(path, value):
                put(config, path, layers)
                depths.setdefault(value, path)
            elif value > FEW_EXPERTS and EXPERTS.search(path):
                put(config, path, FEW_EXPERTS)
        for path, value in members(self.default).items():
            if isinstance(value, list) and len(value) in depths:
                put(config, path, shortened(value, layers))
        return config

    def counts_stages(self, path, value):
        """Whether a number is that of the stages, each with a number of layers in a list."""
        part = path.rpartition(".")[0]
        return any(is_sizes(v) and len(v) == value and p.rpartition(".")[0] == part and STAGE_DEPTHS.search(p + ".0")
                   for p, v in members(self.default).items())

    def without_lists(self, config):
        config = copy.deepcopy(config)
        depths = {v for p, v in members(self.default).items() if is_number(v) and DEPTHS.search(p) and v > 1}
        for path, value in members(self.default).items():
            if isinstance(value, list) and len(value) in depths:
                place, last = place_of(config, path)
                if isinstance(place, dict):
                    place.pop(last, None)
        return config

    def with_numbers(self, config):
        """With a number for each size that the class has no default of."""
        config = copy.deepcopy(config)
        for path, value in members(config).items():
            if value is None and NEEDED.search(path):
                put(config, path, 1 if path.endswith("_id") else 40)
        return config

    def start(self):
        """Finds a config of few layers that shows every kind of tensor of the default config."""
        whole = self.try_config(self.default)
        self.whole = whole
        best = None
        for layers in (FEW_LAYERS, MORE_LAYERS):
            small = self.small(layers)
            for config in (small, self.without_lists(small), *([] if whole else [self.with_numbers(small)])):
                sample = self.try_config(config)
                if sample and (not best or len(sample.patterns) > len(best[1].patterns)):
                    best = config, sample
                if sample and (not whole or sample.patterns.keys() >= whole.patterns.keys()):
                    break
            else:
                continue
            break
        if not best and whole:
            best = self.default, whole
        if not best:
            return None
        self.base, sample = best
        self.values = members(self.base)
        return sample

    def undeclared(self):
        """Sizes that the code reads from a config if it has them, and that the default config has not."""
        names = {name for name in re.findall(r"getattr\(\s*(?:self\.)?\w*config,\s*[\"'](\w+)[\"']", self.source)
                 if NUMBERS.search(name) and not self.is_alias(name)}
        parts = {path.rpartition(".")[0] for path in self.values if re.search(r"[a-z]$", path)}
        paths = {f"{part}.{name}".lstrip(".") for part in parts for name in names}
        return sorted(paths - self.values.keys())

    def is_alias(self, name):
        """Whether configs have this attribute by a member of another name: "num_labels" is the length of id2label."""
        return hasattr(self.config_class, name) or name in getattr(self.config_class, "attribute_map", {})

    def mentions(self, path):
        """Whether the code of the class or of its parts names this member of the config."""
        if path.endswith("id2label.#"):
            return "num_labels" in self.words
        if LAYER_LISTS.search(path):  # the class of the config reads these, not the code of the model
            return True
        if path.endswith("tie_word_embeddings"):  # which only transformers' base class reads
            return "_tied_weights_keys" in self.words
        names = {path.split(".")[-1], *(p for p in path.split(".")[-2:-1] if path.split(".")[-1].isdigit())}
        names |= {alias for alias, name in getattr(self.config_class, "attribute_map", {}).items() if name in names}
        return bool(names & self.words) or "." in path and not path.split(".")[-1].isdigit() and any(
            n in self.words for n in names)

    @functools.cached_property
    def words(self):
        return set(re.findall(r"\w+", self.source))

    source = ""  # of the modules that the class is made of

    def texts_for(self, path):
        """Other texts with which the code compares a member."""
        name = re.escape(path.split(".")[-1])
        texts = re.findall(rf"\b{name}\s*(?:==|!=)\s*[\"'](\w+)[\"']", self.source)
        for group in re.findall(rf"\b{name}\s+(?:not\s+)?in\s*[\[(]([^\])]*)[\])]", self.source):
            texts += re.findall(r"[\"'](\w+)[\"']", group)
        return list(dict.fromkeys(texts))[:4]

    def candidates(self, path, value):
        if isinstance(value, str):
            return [t for t in self.texts_for(path) if t != value]
        if isinstance(value, list):
            return self.other_lists(path, value)
        if value is None and LAYER_LISTS.search(path):
            return [[1], [0]]
        if value is None and not NUMBERS.search(path):
            return []
        if isinstance(value, float):
            return [value * 2, value / 2]
        return changes_of(value) if is_number(value) or value is None else []

    def other_lists(self, path, value):
        """Lists of the same length, of the same entries in other orders or with one of another kind."""
        if not value or is_sizes(value) and not self.is_per_layer(path):
            return []
        kinds = list(dict.fromkeys(map(str, value)))
        others = [k for k in KINDS if k in self.words and k not in kinds] if isinstance(value[0], str) else []
        orders = [value[1:] + value[:1], value[::-1]] if len(kinds) > 1 else []
        return orders + [value[:-1] + [k] for k in others]

    def is_per_layer(self, path, *depths):
        """Whether a list has an entry for each layer, in the base and, if it is there, in the default config. One entry and one
        layer are a coincidence."""
        depths = depths or [p for p, v in self.values.items()
                            if is_number(v) and DEPTHS.search(p) and not self.counts_stages(p, v)]
        default = members(self.default)
        return any(len(self.values[path]) == self.values[depth] > 1 for depth in depths
                   if not isinstance(default.get(path), list) or len(default[path]) == default.get(depth))

    def change_each(self, base):
        failed = []
        for path, value in self.values.items():
            if HARMLESS.search(re.sub(r"\.\d+$", "", path)) or not self.mentions(path):
                continue
            if is_number(value) and DEPTHS.search(path) and self.counts_stages(path, value):
                self.fix(path, value)
                continue
            self.change(base, path, value)
            if path not in self.moves and value not in (None, False, 0, "", []) and not is_sizes(value):
                failed.append(path)
        self.change_two(base, [f for f in failed if type(self.values[f]) is int])
        for path in failed:
            if path not in self.moves and not any(path in move for move in self.joint):
                self.fix(path, self.values[path])
        for path in {f for *_, f in self.pairs}:
            if isinstance(self.values[path], list):
                self.fix(path, self.values[path])

    def fix(self, path, value):
        if isinstance(value, list) and self.is_per_layer(path):
            tried = [v for move in self.moves.get(path, ()) for v in move]
            self.fixed[path + "[]"] = list(dict.fromkeys([*value, *tried]))
        elif not isinstance(value, list) or path not in self.moves:
            self.fixed[path] = members(self.default).get(path, value)

    def change(self, base, path, value):
        """Tries other values of a member."""
        tried = 0
        for to in self.candidates(path, value):
            sample = self.sample({path: to})
            if sample is None:
                continue
            self.moves.setdefault(path, []).append(to)
            tried += 1
            self.add_pair(base, sample, path)
            if tried == (3 if isinstance(value, (str, list)) else 2 if value is None else 1):
                break
        if type(value) is int and value > 1 and any(s.shapes.keys() != base.shapes.keys() for _, s, p in self.pairs if p == path):
            self.reduce(base, path, value // 2)

    def reduce(self, base, path, value):
        """Tries a smaller value of a member that changes the names, because larger ones alone may only add some."""
        sample = self.sample({path: value})
        if sample:
            self.moves.setdefault(path, []).append(value)
            self.add_pair(base, sample, path)

    def add_pair(self, base, sample, *paths):
        if sample.patterns != base.patterns:
            self.samples.append(sample)
            self.pairs += [(base, sample, path) for path in paths]

    def change_two(self, base, paths):
        """Changes numbers together that cannot be changed alone: a width and the number of its heads."""
        for f, g in itertools.combinations(paths[:8], 2):
            if f.rpartition(".")[0] != g.rpartition(".")[0]:
                continue
            for a, b in ((2 * self.values[f], 2 * self.values[g]), (2 * self.values[f], self.values[g] // 2)):
                sample = self.sample({f: a, g: b})
                if sample:
                    self.joint.append({f: a, g: b})
                    self.add_pair(base, sample, f, g)
                    break

    def change_beside_additions(self, base):
        contexts = {}
        for _, sample, path in list(self.pairs):
            added = frozenset(sample.kinds - base.kinds)
            if self.values[path] is None or added and not any(added <= other for other, _ in contexts.values()):
                contexts[path] = added, sample
        used = sorted({f for *_, f in self.pairs})
        used = [f for f in used if not isinstance(self.values[f], (bool, str))]
        for context, (added, there) in list(contexts.items())[:MAX_CONTEXTS]:
            change = {context: there.values.get(context)}
            for path in used:
                if path not in self.moves or context.startswith(path + ".") or path.startswith(context + "."):
                    continue
                sample = self.sample({**change, path: self.unlike(path, there)})
                if sample and sample.patterns != there.patterns:
                    self.samples.append(sample)
                    self.pairs.append((there, sample, path))

    def change_beside_more_layers(self, base):
        """Makes the changes that remove tensors again with more layers: the base has so few that a number of dense layers
        may leave none with experts."""
        depths = [f for f in self.moves if DEPTHS.search(f) and is_number(self.values[f])]
        removing = {path: s.values.get(path) for b, s, path in self.pairs if b is base and base.kinds - s.kinds}
        for path, depth in itertools.product(removing, depths):
            if path not in depths and is_number(removing[path]) and not isinstance(removing[path], bool):
                self.samples += filter(None, [self.sample({path: removing[path], depth: MORE_LAYERS})])

    def unlike(self, path, sample):
        """A value for a member that no member of the sample has, so that it shows what depends on it."""
        others = [value for value in self.further(path)[::-1] if value not in sample.values.values()]
        return next((value for value in others if value in self.moves[path]), others[-1] if others else self.moves[path][-1])

    def find_computed(self):
        """Numbers that a config without them computes from others."""
        depends = collections.defaultdict(list)
        plain = members(self.default)
        for path in {f for *_, f in self.pairs}:
            if not is_number(plain.get(path)) or isinstance(plain[path], bool) or "." in path:
                continue
            for factor in (2, 4, 1):
                try:
                    value = plain[path] * factor + (factor == 1) * 8
                    other = members(as_lists(self.config_class(**{path: value}).to_dict()))
                except Exception:  # no config
                    continue
                for name, number in other.items():
                    if name != path and is_number(number) and plain.get(name) != number and "." not in name:
                        depends[name].append((other, path))
        for name, changes in depends.items():
            fields = sorted({path for _, path in changes})
            samples = [(plain, plain.get(name))] + [(other, other[name]) for other, _ in changes]
            for more in ([], [f for f in self.values if re.search(r"(^|_)(heads?|groups?|size)$", f) and "." not in f][:3]):
                fields = sorted({*fields, *more} - {name})
                formula = plain.get(name) is not None and formula_of(fields, samples)
                if formula and not formula.isdigit():
                    self.computed[name] = formula
                    break
            else:
                self.computed[name] = "?"

    def draw(self):
        used = sorted({f for *_, f in self.pairs if f in self.moves})
        some = self.random.sample(used, min(len(used), self.random.randint(2, 5)))
        changes = {f: self.random.choice(self.further(f)) for f in some}
        if self.joint and self.random.random() < 0.5:
            changes.update(self.random.choice(self.joint))
        if self.random.random() < 0.5:
            changes.update(self.draw_lists(used))
        return self.sample(changes) if changes else None

    def draw_lists(self, used):
        """Other entries for the lists of a part that have one for each stage: small numbers one by one, and others times one
        factor in all lists, because widths are often multiples of a number of heads. Some get 2 more, to show roundings."""
        groups = collections.defaultdict(list)
        for path, value in self.values.items():
            if is_sizes(value) and len(value) > 1 and any(f"{path}.{i}" in used for i in range(len(value))):
                groups[path.rpartition(".")[0], len(value)].append(path)
        if not groups:
            return {}
        factor, out = self.random.choice((2, 3)), {}
        for path in self.random.choice(list(groups.values())):
            value = self.values[path]
            if self.random.random() < 0.6:
                most = max(value)
                for i, n in enumerate(value):
                    drawn = self.random.randint(1, most + 1) if most < 8 else factor * n + self.random.choice(ODDS)
                    out[f"{path}.{i}"] = drawn
        return out

    def further(self, path):
        """Values to draw from: those that make a model, and more of their kind."""
        value = self.moves[path][0]
        if type(value) is not int or value < 2:
            return self.moves[path]
        return [*self.moves[path], value * 2, value * 3 if value > 8 else value + 1]

    def confirm(self):
        """Derives the rows until they hold for further random configs. Until the last attempt, tensors that are in no row
        count as a contradiction."""
        for attempt in range(ATTEMPTS):
            self.confirmed, failures = 0, 0
            rows = self.rows()
            for _ in range(4 * CONFIRMATIONS):
                sample = self.draw()
                if sample is None:
                    continue
                self.caught = contradictions(rows, sample)
                if self.caught or (attempt < ATTEMPTS - 1 and unknown_names(rows, sample)):
                    self.samples.append(sample)
                    failures += 1
                else:
                    self.confirmed += 1
                if self.confirmed == CONFIRMATIONS or failures == 3:
                    break
            if not failures:
                break
        return rows

    def derive(self):
        """Returns the rows, or None if the class could not be built."""
        base = self.start()
        if not base:
            return None
        if any(0 in shape for shape in base.shapes.values()):
            self.problem = "its default config has parameters without elements"
            return None
        self.source = self.build.source()
        self.values.update(dict.fromkeys(self.undeclared(), None))
        self.samples.append(base)
        self.change_each(base)
        self.change_beside_additions(base)
        self.change_beside_more_layers(base)
        self.find_computed()
        rows = self.confirm()
        if self.whole:
            wrong = contradictions(rows, self.whole)
            if wrong:
                self.samples.append(self.whole)
                rows = self.confirm()
            self.caught = contradictions(rows, self.whole)
            self.holds_for_default = not self.caught
        rows = self.check_further(self.confirm_small(self.confirm_roundings(self.confirm_others(rows))))
        if rows:
            self.fix_lists(rows, base)
        return rows

    def fix_lists(self, rows, base):
        """Fixes each list for which other entries contradict the rows, or its length if only that does. It is 0 for a number
        that may be a list."""
        def is_wrong(path, other):
            sample = self.sample({path: other})
            return sample and (contradictions(rows, sample) or unknown_names(rows, sample) > unknown_names(rows, base))

        default = members(self.default)
        for path, value in self.values.items():
            if type(value) is int and self.may_be_list(path) and is_wrong(path, [value, value]):
                self.fixed[path + ".#"] = 0
            elif isinstance(value, list) and value and not OPAQUE.search(path):
                if any(is_wrong(path, other) for other in with_other_entries(value)):
                    self.fixed[path] = default.get(path, value)
                elif not self.is_per_layer(path) and any(is_wrong(path, o) for o in (value + value[-1:], value[:-1]) if o):
                    self.fixed[path + ".#"] = len(value)

    def may_be_list(self, path):
        name = re.escape(path.split(".")[-1])
        return re.search(rf"isinstance\(\s*[\w.]*config\.{name},\s*(int|list|tuple|\()", self.source)

    def confirm_others(self, rows):
        for config in self.others:
            sample = self.try_config(config)
            if sample and (contradictions(rows, sample) or unknown_names(rows, sample)):
                self.samples.append(sample)
                rows = self.confirm()
                self.caught = contradictions(rows, sample)
        return rows

    def confirm_roundings(self, rows):
        """Derives the rows again if sizes that are no multiples of their divisor contradict them: a quotient may be rounded
        down, up or to the nearest number."""
        divided = {found for row in rows for text in row.dims for found in re.findall(r"([A-Za-z_][\w.]*)[/:](\d+)", text)}
        tried = []
        for path, divisor in sorted(divided):
            value, k = self.values.get(path), int(divisor)
            if type(value) is not int or k < 2:
                continue
            for remainder in sorted({1, k - 1}):
                drawn = (self.sample({path: n * k + remainder}) for n in (value // k, 17, 3))
                tried += list(itertools.islice((s for s in drawn if s), 1))
        if not any(contradictions(rows, sample) for sample in tried):
            return rows
        self.samples += tried
        return self.confirm()

    def confirm_small(self, rows):
        """Derives the rows again if small models contradict them, in which numbers are no longer what they are in all others."""
        wrong, depths = [], {f: MORE_LAYERS for f in self.moves if DEPTHS.search(f) and is_number(self.values[f])}
        for sample in filter(None, (self.sample({}), self.sample(depths), self.draw_further())):
            config, shapes = smaller(self.build, sample.made)
            small = Sample(config, shapes)
            if contradictions(rows, small):
                wrong.append(small)
        self.samples += wrong
        return self.confirm() if wrong else rows

    def draw_further(self):
        """A sample with some numbers changed, of all numbers: also of those on which nothing seems to depend."""
        fields = [f for f, v in self.values.items() if is_number(v) and v and not isinstance(v, bool) and not HARMLESS.search(f)]
        some = self.random.sample(fields, min(3, len(fields)))
        sample = self.sample({f: self.values[f] * 2 if self.values[f] > 8 else self.values[f] + 1 for f in some})
        return sample if sample and can_attend(sample.values) else None

    def check_further(self, rows):
        """Derives the rows again if they contradict such samples, and leaves open what still contradicts a sample. Returns
        None if that does not end."""
        for attempt in range(ATTEMPTS):
            drawn = [s for s in (self.draw_further() for _ in range(CONFIRMATIONS)) if s]
            wrong = [s for s in drawn if contradictions(rows, s)]
            self.samples += wrong
            if attempt == 0 and wrong:
                rows = self.confirm()
            known = [*self.samples, *([self.whole] if self.whole else [])]
            looser = loosened(rows, known)
            if not wrong and looser == rows:
                return rows
            rows = looser
        self.problem = "its formulas do not hold for further configs"
        return None

    # rows

    def fields_of(self, quantity):
        """The members on which a quantity of a sample depends."""
        out = set()
        for before, after, path in self.pairs:
            a, b = quantity(before), quantity(after)
            if a is not None and b is not None and a != b:
                out.add(path)
        return sorted(out)

    def fields_for(self, quantity, samples):
        """The members on which a quantity depends, and lists with one more if samples, [(values, result)], show that they are
        not all: of the width and the number of heads, a change of the latter alone leaves "width/heads*heads" the same."""
        fields = self.fields_of(quantity)
        yield fields
        if fields and results_by(fields, samples) is None:
            longer = (sorted([*fields, f]) for f in self.used_numbers if f not in fields)
            enough = (more for more in longer if len(results_by(more, samples) or ()) >= FEWEST_RESULTS)
            yield from itertools.islice(enough, LONGER)

    @property
    def used_numbers(self):
        return sorted({f for *_, f in self.pairs if is_number(self.values.get(f))})

    def is_unvaried(self, formula):
        """Whether a constant equals a member that had no other value while the row existed, so that it may depend on it; also
        the constant of a product, "512*num_heads", that equals a size or number of heads or a number of layers."""
        return any(self.has_unvaried(alternative) for alternative in formula.split(";"))

    def has_unvaried(self, formula):
        constant = re.fullmatch(r"(\d+)(?:\*([A-Za-z_][\w.]*).*)?", formula)
        if not constant or int(constant[1]) < SMALLEST_SIZE:
            return False
        paths = self.numbers.get(int(constant[1]), ())
        part = (constant[2] or "").rpartition(".")[0]
        return bool(paths) if not constant[2] else any(
            FACTORS.search(path) and path.rpartition(".")[0] == part for path in paths)

    @functools.cached_property
    def numbers(self):
        """{number: members that have it in the base or by default}."""
        out = collections.defaultdict(set)
        for path, n in (*self.values.items(), *members(self.default).items(), *layers_numbers(self.default)):
            if type(n) is int:
                out[n].add(path)
        return out

    def condition(self, known, facts):
        """condition_of(), once for the many rows that are alike."""
        key = tuple(known), tuple((id(v), n, r) for v, n, r in facts)  # the samples keep the values
        if key not in self.conditions:
            self.conditions[key] = condition_of(known, facts)
        return self.conditions[key]

    def rows(self):
        out = []
        for pattern in sorted({p for s in self.samples for p in s.patterns}):
            out += self.rows_of(pattern)
        return merged(out)

    def rows_of(self, pattern):
        """Rows of a pattern: numbers that are the same in all samples are part of the names."""
        there = [s for s in self.samples if pattern in s.patterns]
        places = range(pattern.count("{}"))
        fixed = [k for k in places if len({frozenset(i[k] for i in s.patterns[pattern]) for s in there}) == 1]
        # A list whose length depends on a member is counted even if it has the same length in all samples.
        counted = [k for k in places if k not in fixed]
        for numbers in sorted({tuple(i[k] for k in fixed) for s in there for i in s.patterns[pattern]}):
            words = dict(zip(fixed, numbers))
            name = fill(pattern, words)
            own = {id(s): {i: x for i, x in s.patterns[pattern].items() if all(i[k] == n for k, n in words.items())}
                   for s in self.samples if pattern in s.patterns}
            yield from Quantities(self, pattern, name, words, counted, own).rows()


def shortened(value, layers):
    """The first of each kind and then as many of the first as there are layers."""
    kinds = {}
    for i, v in enumerate(value):
        kinds.setdefault(str(v), i)
    keep = sorted([*kinds.values(), *[i for i in range(len(value)) if i not in kinds.values()]][:layers])
    return [value[i] for i in keep]


def with_other_entries(value):
    """Lists like this one in another order, or with other numbers."""
    out = [value[::-1], value[1:] + value[:1]]
    if all(type(n) is bool for n in value):
        out.append([not n for n in value])
    elif all(type(n) is int for n in value):
        larger = [n + 1 if n < 8 else 2 * n for n in value]
        out += [larger, [m if i % 2 else n for i, (n, m) in enumerate(zip(value, larger))]]
    elif all(isinstance(n, list) and n for n in value):
        out.append([n + n[-1:] for n in value])
    return [other for other in out if other != value]


def fill(pattern, words):
    parts = pattern.split("{}")
    return parts[0] + "".join(str(words.get(k, "{}")) + part for k, part in enumerate(parts[1:]))


class Quantities:
    """The dimensions, counts and condition of one name in the samples of a derivation."""

    def __init__(self, derivation, pattern, name, words, counted, own):
        self.d, self.pattern, self.name, self.words, self.counted, self.own = derivation, pattern, name, words, counted, own

    def found(self, sample):
        return self.own.get(id(sample)) or {}

    def count(self, sample, k):
        """The numbers at a place in all names that begin alike."""
        begin = "{}".join(self.pattern.split("{}")[:k + 1]).lstrip(FILES + MEMORY + TIED)
        top = -1
        for (b, before), numbers in sample.numbers.items():
            if b == begin and all(before[j] == n for j, n in self.words.items() if j < k):
                top = max(top, *numbers)
        return top + 1

    def rows(self):
        there = [s for s in self.d.samples if self.found(s)]
        if not there:
            return
        ranks = {len(shape) for s in there for shape in self.found(s).values()}
        if len(ranks) > 1:
            for rank in sorted(ranks):
                own = {key: {i: x for i, x in found.items() if len(x) == rank} for key, found in self.own.items()}
                yield from Quantities(self.d, self.pattern, self.name, self.words, self.counted, own).rows()
            return
        counts = [self.formula(lambda s, k=k: self.count(s, k), there) for k in self.counted]
        rows = list(self.each_number(there) if None in counts else self.split(self.when(there), counts, there))
        if open_ends(rows):
            others = [list(self.each_at(k, there)) for k, count in zip(self.counted, counts) if self.has_few(k, count, there)]
            rows = min([rows, *others], key=lambda r: (open_ends(r), size_of_texts(r)))
        yield from rows

    def has_few(self, place, count, there):
        """Whether each number at a place may have rows of its own, as stages have, and levels. Layers have none."""
        is_depth = any(DEPTHS.search(member) or STAGE_DEPTHS.search(member) for member in used_in([count or ""]))
        return not is_depth and len({i[place] for s in there for i in self.found(s)}) <= LONGEST_LIST

    def each_at(self, place, there):
        """Rows for each of the numbers at a place."""
        others = [k for k in self.counted if k != place]
        for number in sorted({i[place] for s in there for i in self.found(s)}):
            words = {**self.words, place: number}
            own = {key: {i: x for i, x in found.items() if i[place] == number} for key, found in self.own.items()}
            yield from Quantities(self.d, self.pattern, fill(self.pattern, words), words, others, own).rows()

    def each_number(self, there):
        """A row for each number that was seen, where no formula counts them."""
        for numbers in sorted({i for s in there for i in self.found(s)})[:MOST_NUMBERS]:
            facts = [(s, numbers, self.found(s)[numbers]) for s in there if numbers in self.found(s)]
            dims = self.dims(facts)
            if dims is not None:
                yield Row(fill(self.pattern, dict(enumerate(numbers))), tuple(dims), (), self.as_in_base(numbers))

    def as_in_base(self, numbers):
        """The condition that the members on which the counts depend are those of the base, if all such samples have the name."""
        fields = {f for k in self.counted for f in self.d.fields_of(lambda s, k=k: self.count(s, k))}
        fields |= set(self.d.fields_of(lambda s: numbers in self.found(s)))
        base = {f: self.d.values.get(f) for f in sorted(fields)}
        alike = [s for s in self.d.samples if all(s.values.get(f) == n for f, n in base.items())]
        if not base or not all(map(is_number, base.values())) or not all(numbers in self.found(s) for s in alike):
            return "?"
        return "&".join(f"{f}={literal(n)}" for f, n in base.items())

    def formula(self, quantity, there):
        """A formula for all samples that have such names, or for those that have this one."""
        for samples in ([s for s in self.d.samples if quantity(s)], there):
            known = {id(s): quantity(s) for s in samples}
            if found := self.formula_for(known, [(s.values, known[id(s)]) for s in samples]):
                return found
        return None

    def formula_for(self, known, samples):
        """A formula for {id of a sample: result}."""
        found = (formula_of(fields, samples) for fields in self.d.fields_for(lambda s: known.get(id(s)), samples))
        return next(filter(None, found), None)

    def row(self, facts, counts, when):
        dims = self.dims(facts)
        return [] if dims is None else [Row(self.name, tuple(dims), tuple(counts), when)]

    # presence

    def when(self, there):
        """The condition under which the tensor is there, and in which layers."""
        if MAY_LACK.search(self.name):
            return "?"
        conditions = self.overall(), self.layers(there)
        return "?" if "?" in conditions else "&".join(c for c in conditions if c)

    def overall(self):
        samples = [(s, bool(self.found(s))) for s in self.d.samples]
        if all(x for _, x in samples):
            return ""
        lists = self.d.fields_for(lambda s: bool(self.found(s)), [(s.values, x) for s, x in samples])
        facts = [(s.values, None, x) for s, x in samples]
        found = (self.d.condition(atoms(fields, self.d.samples), facts) for fields in lists)
        return next(filter(None, found), "?")

    def layers(self, there):
        """The condition on the number of the first {} that is not written."""
        samples = []
        for s in there:
            found = self.found(s)
            sizes = [self.count(s, k) for k in self.counted]
            total = 1
            for n in sizes:
                total *= n
            if total == len(found):
                samples.append((s, None))
                continue
            numbers = {i[self.counted[0]] for i in found} if self.counted else set()
            others = total // sizes[0] if sizes and sizes[0] else 0
            if len(numbers) * others != len(found):
                return "?"
            samples.append((s, numbers))
        if all(numbers is None for _, numbers in samples):
            return ""
        facts = [(s.values, n, numbers is None or n in numbers) for s, numbers in samples for n in range(self.count(s, self.counted[0]))]
        count = self.formula(lambda s: self.count(s, self.counted[0]), there)
        return self.d.condition(layer_atoms(facts, self.d, count), facts) or "?"

    # shapes

    def split(self, when, counts, there):
        """One row, or one for each kind of layer that has shapes of its own."""
        facts = [(s, i, shape) for s in there for i, shape in self.found(s).items()]
        if self.counted and when != "?" and ";" not in when and not alike(facts):
            layer = self.counted[0]
            for atom in layer_atoms([(s.values, i[layer], True) for s, i, _ in facts], self.d, counts[0]):
                parts = [[f for f in facts if holds(atom, f[0].values, f[1][layer]) is wanted] for wanted in (True, False)]
                if all(parts) and sum(map(len, parts)) == len(facts) and all(map(alike, parts)):
                    for part, sign in zip(parts, ("", "!")):
                        yield from self.row(part, counts, "&".join(c for c in (when, sign + atom) if c))
                    return
        yield from self.row(facts, counts, when)

    def dims(self, facts):
        """Formulas for [(sample, numbers, shape)]; None where the rank changes."""
        if len({len(shape) for *_, shape in facts}) != 1:
            return None
        by_sample = collections.defaultdict(list)
        for s, i, shape in facts:
            by_sample[id(s)].append((s, i, shape))
        is_single = len(by_sample) == 1 < len(self.d.samples)  # a size that one config showed may depend on any member
        out = []
        for d in range(len(facts[0][2])):
            sizes = {key: {shape[d] for _, _, shape in group} for key, group in by_sample.items()}
            if any(len(x) > 1 for x in sizes.values()):
                out.append(self.per_layer(facts, d) or "?")
                continue
            size_of = {key: next(iter(x)) for key, x in sizes.items()}
            formula = self.formula_for(size_of, [(group[0][0].values, size_of[key]) for key, group in by_sample.items()])
            is_open = formula is None or self.d.is_unvaried(formula) or is_single and formula.isdigit() and formula != "1"
            out.append("?" if is_open else formula)
        return out

    def per_layer(self, facts, d):
        """A formula over the entries of lists that have one for each layer."""
        if not self.counted:
            return None
        layer = self.counted[0]
        lists = [p for p, v in facts[0][0].values.items() if isinstance(v, list) and v and all(type(n) is int for n in v)]
        for path in lists:
            samples = []
            for s, i, shape in facts:
                entry = listed(path + "[#]", s.values, i[layer])
                samples.append(({**s.values, path + "[#]": entry}, shape[d]))
            if all(is_number(v[path + "[#]"]) for v, _ in samples):
                formula = formula_of([path + "[#]"], samples)
                if formula:
                    return formula
        return None


def open_ends(rows):
    """The part of the rows' sizes and conditions for which there are no formulas."""
    ends = [text for row in rows for text in (*row.dims, row.when)]
    return sum(text == "?" for text in ends) / len(ends) if ends else 1


def size_of_texts(rows):
    return sum(len(text) for row in rows for text in (row.name, *row.dims, *row.counts, row.when))


def alike(facts):
    by_sample = collections.defaultdict(set)
    for s, _, shape in facts:
        by_sample[id(s)].add(tuple(shape))
    return all(len(x) == 1 for x in by_sample.values())


def atoms(fields, samples):
    """Conditions over members that might say whether a tensor is there."""
    out = []
    for f in fields:
        values = {json.dumps(s.values.get(f)): s.values.get(f) for s in samples}.values()
        out.append(f)
        out += [f"{f}={literal(v)}" for v in values if isinstance(v, str) or (is_number(v) and not isinstance(v, bool))]
        out += [f"{f}<{v}" for v in sorted({v for v in values if is_number(v)}) if v > 1]
    numbers = [f for f in fields if any(is_number(s.values.get(f)) and not isinstance(s.values.get(f), bool) for s in samples)]
    out += [f"{f}={g}" for f, g in itertools.combinations(numbers, 2)]
    out += [f"{f}<{g}" for f, g in itertools.permutations(numbers, 2)]
    out += [f"{f}={g}*{h}" for f, g, h in itertools.permutations(numbers, 3) if g < h]
    return out


def layer_atoms(facts, derivation, count):
    """Conditions on the number of a layer, of which there are `count`. facts: [(values, number, whether it is there)]."""
    values = facts[0][0]
    used = {f for *_, f in derivation.pairs}
    out = ["#=0", "#%2=0", "#%2=1"]
    if count and ";" not in count:
        out += [f"#{operation}{count}-{k}" for k in (1, 2) for operation in "=<"]
    lists = {p: v for members, *_ in facts for p, v in members.items() if isinstance(v, list) and v}
    for path, value in {**lists, **values}.items():
        value = value if value is not None else lists.get(path)
        if isinstance(value, list) and value and not HARMLESS.search(path):
            out += [f"{path}[#]={literal(v)}" for v in dict.fromkeys(x for x in value if isinstance(x, (str, int)))]
            out.append(f"{path}[#]")
            out.append(f"#@{path}")
    numbers = [f for f in sorted(used) if is_number(values.get(f)) and not isinstance(values.get(f), bool)]
    for f in numbers:
        out += [f"#<{f}", f"#<{f}-1", f"#={f}-1", f"#%{f}=0", f"#%{f}={f}-1", f"#%{f}=1"]
    return out


NOT_A_NUMBER = re.compile(r"![^#=]+=-?[0-9.]+")


def condition_of(known, facts):
    """The simplest condition that tells in which facts, [(values, number, result)], the result is true. None: no one."""
    wanted = tuple(r for *_, r in facts)
    # "Not 4" may have been seen at 8 and 16 only, where it is "more than 4": another condition that fits is tried first.
    signed = [text for atom in known for text in (atom, "!" + atom)]
    signed.sort(key=lambda text: bool(NOT_A_NUMBER.fullmatch(text)))
    for text in signed:
        if all(holds(text, v, n) is r for v, n, r in facts):
            return text
    vectors = {}
    for atom in known:
        x = tuple(holds(atom, v, n) for v, n, _ in facts)
        if None not in x:
            vectors.setdefault(x, atom)
            vectors.setdefault(tuple(not a for a in x), "!" + atom)
    few = [(x, t) for x, t in vectors.items()][:120]
    above = [(x, t) for x, t in few if all(a or not w for a, w in zip(x, wanted))]
    for (x, t), (y, u) in itertools.combinations(above, 2):
        if tuple(a and b for a, b in zip(x, y)) == wanted:
            return f"{t}&{u}"
    below = [(x, t) for x, t in few if all(w or not a for a, w in zip(x, wanted))]
    for (x, t), (y, u) in itertools.combinations(below, 2):
        if tuple(a or b for a, b in zip(x, y)) == wanted:
            return f"{t};{u}"
    return None


def merged(rows):
    """Joins rows that differ in one number only, where the numbers are 0 to n: the count is n then."""
    while True:
        groups = collections.defaultdict(dict)
        for row in rows:
            for match in NUMBER.finditer(row.name):
                if "#" in row.when or any("[#]" in d for d in row.dims):
                    continue
                before = row.name[:match.start()].count("{}")
                key = row.name[:match.start()], row.name[match.end():], before, row.dims, row.counts, row.when
                groups[key][int(match[0])] = row
        joined, out = set(), []
        for (begin, end, place, dims, counts, when), found in groups.items():
            whole = sorted(found) == list(range(len(found)))
            if len(found) > 1 and whole and not any(r in joined for r in found.values()):
                joined.update(found.values())
                out.append(Row(f"{begin}{{}}{end}", dims, (*counts[:place], str(len(found)), *counts[place:]), when))
        if not out:
            return sorted(rows)
        rows = [r for r in rows if r not in joined] + out


# ---- what the rows say of a config

def expand(rows, values):
    """{name: [(row, shape, whether it must be there)]} of a config."""
    out = collections.defaultdict(list)
    for row in rows:
        counts = [evaluate(c, values.get) for c in row.counts]
        if None in counts:
            continue
        for numbers in itertools.product(*map(range, counts)):
            first = numbers[0] if numbers else None
            there = holds(row.when, values, first)
            if there is False:
                continue
            number_of = lambda name, n=first: listed(name, values, n)
            dims = [None if d == "?" else evaluate(d, number_of) for d in row.dims]
            out[row.name.replace("{}", "%d") % numbers].append((row, dims, there and row.when != "?"))
    return out


def unknown_names(rows, sample):
    """How many tensors of a sample are in no row."""
    return len(sample.shapes.keys() - expand(rows, sample.values).keys())


def contradictions(rows, sample):
    """{name: what is wrong} of rows and a sample. Names that are in no row are not checked, and so never wrong."""
    wanted, out = expand(rows, sample.values), {}
    for name, shape in sample.shapes.items():
        known = wanted.get(name)
        if not known:
            continue
        if not any(len(dims) == len(shape) and all(a in (None, b) for a, b in zip(dims, shape)) for _, dims, _ in known):
            out[name] = f"{shape} for {known[0][1]}"
    for name, known in wanted.items():
        if name not in sample.shapes and any(must for *_, must in known):
            out[name] = "not in the model"
    return out


def loosened(rows, samples):
    """Rows that no sample contradicts: with "?" for the sizes and conditions that are wrong in one."""
    out = {row: row for row in rows}
    for sample in samples:
        wanted = expand(rows, sample.values)
        for name in contradictions(rows, sample):
            shape = sample.shapes.get(name)
            for row, dims, _ in wanted[name]:
                known = out[row]
                if shape is None:
                    out[row] = known._replace(when="?")
                elif len(shape) == len(dims):
                    sizes = (d if a in (None, b) else "?" for d, a, b in zip(known.dims, dims, shape))
                    out[row] = known._replace(dims=tuple(sizes))
    return sorted(out.values())


# ---- one type

class Texts:
    """The texts of a type's rows, which stand for their numbers in it."""

    def __init__(self):
        self.numbers = {}

    def number(self, text):
        return str(self.numbers.setdefault(text, len(self.numbers))) if text else ""


def compact(rows, texts):
    """Rows as texts. A name begins with the number of components that it shares with the one before."""
    out, before = [], []
    for row in rows:
        parts = row.name.split(".")
        same = next((i for i, (a, b) in enumerate(zip(parts, before)) if a != b), min(len(parts), len(before)))
        same = min(same, 9, len(parts) - 1)
        columns = (",".join(row.dims), ",".join(row.counts), row.when)
        out.append("|".join([f"{same}{'.'.join(parts[same:])}", *map(texts.number, columns)]).rstrip("|"))
        before = parts
    return " ".join(out)


def line_of(model_type, derived):
    """The line of a type in architectures.jsonl. `derived`: [(derivation, rows)]."""
    prefix = next((d.prefix + "." for d, _ in derived if d.prefix), "")
    owners = collections.defaultdict(list)  # (whether it is the base's, row): classes
    bare = []
    for i, (d, rows) in enumerate(derived):
        has_prefix = any(row.name.lstrip(FILES + MEMORY + TIED).startswith(prefix) for row in rows)
        bare += [] if has_prefix else [i]
        for row in rows:
            mark = row.name[0] if row.name[0] in FILES + MEMORY + TIED else ""
            name = row.name[len(mark):]
            is_base = bool(prefix) and (name.startswith(prefix) or not has_prefix)
            owners[is_base, row._replace(name=mark + (name.removeprefix(prefix) if is_base else name))].append(i)
    groups = collections.defaultdict(list)
    for (is_base, row), classes in owners.items():
        groups[is_base, tuple(classes)].append(row)
    texts = Texts()
    parts = {word: [{"in": list(classes), "rows": compact(sorted(rows), texts)} for (b, classes), rows in sorted(groups.items()) if b == is_base]
             for word, is_base in (("base", True), ("own", False))}
    defaults, fixed, computed = {}, {}, {}
    for d, rows in derived:
        used = used_members(rows)
        default = members(d.default)
        defaults.update({f: default[f] for f in sorted(used) if isinstance(default.get(f), (int, str))})
        computed.update({f: c for f, c in d.computed.items() if f in used})
        computed.update({f: f"{f[:-len('id2label.#')]}num_labels;2" for f in used if f.endswith("id2label.#")})
        lists = {f.rpartition(".")[0] for f in used if f.rpartition(".")[2].isdigit()}
        fixed.update({f"{path}.#": len(default[path]) for path in sorted(lists) if isinstance(default.get(path), list)})
        # Lists of layers ("mlp_only_layers") are not drawn: the rows hold for none.
        fixed.update({f"{path}.#": 0 for path, value in default.items() if value == []})
        fixed.update(d.fixed)
        fixed.update(types_of_parts(d.config_class, d.default))
    for f in computed:
        defaults.pop(f, None)
    return json.dumps({"type": model_type, "prefix": prefix, "transformers": transformers.__version__,
                       "classes": [d.name for d, _ in derived], "bare": bare, "defaults": defaults, "computed": computed, "fixed": fixed,
                       "texts": list(texts.numbers), **parts},
                      separators=(",", ":"))


def types_of_parts(config_class, default, prefix=""):
    """{member: model type} of the parts of a config that may be of any type: the rows hold for the default's type."""
    out = {}
    for name, part_class in getattr(config_class, "sub_configs", {}).items():
        part = default.get(name)
        if not isinstance(part, dict):
            continue
        if part_class is transformers.AutoConfig and isinstance(part.get("model_type"), str):
            out[f"{prefix}{name}.model_type"] = part["model_type"]
        elif part_class is not transformers.AutoConfig:
            out.update(types_of_parts(part_class, part, f"{prefix}{name}."))
    return out


def used_members(rows):
    return used_in({text for row in rows for text in (*row.dims, *row.counts, row.when)})


def used_in(texts):
    return {word.removesuffix("[") for text in texts for word in re.findall(r"[A-Za-z_](?:\w|\.(?=\w))*(?:\.#|\[)?", re.sub(r"'[^']*'", "", text))}


def derive_type(model_type, classes, default=None, further=()):
    """The line of a type, or None, and what to report of each class. `default` is a config with the class's own defaults if
    the type is not one of transformers', and the rows hold for the configs `further`, too."""
    made, report = [], []
    for cls in classes:
        try:
            with within(MOST_SECONDS):
                d = Derivation(model_type, cls.__name__, cls.base_model_prefix, Builder(cls), default, further)
                rows = d.derive()
        except TooLong:
            report.append({"class": cls.__name__, "why": "deriving it takes too long"})
            continue
        except huggingface_hub.errors.StrictDataclassError as e:  # of the default config
            report.append({"class": cls.__name__, "why": " ".join(str(e).split())[:100]})
            continue
        if not rows:
            report.append({"class": cls.__name__, "why": d.problem or "it has no tensors"})
            continue
        sizes = [size for row in rows for size in row.dims]
        if 2 * sizes.count("?") > len(sizes):
            report.append({"class": cls.__name__, "why": "its sizes follow no formulas"})
            continue
        made.append((d, rows))
        report.append({"class": cls.__name__, "rows": len(rows), "sizes": len(sizes), "unknown": sizes.count("?"),
                       "optional": sum(row.when == "?" for row in rows), "configs": d.confirmed, "builds": d.builds,
                       "default": d.holds_for_default,
                       "unlisted": unknown_names(rows, d.whole) if d.whole else 0, "wrong": dict(list(d.caught.items())[:3]), "fixed": d.fixed})
    return line_of(model_type, made) if made else None, report


def can_attend(values):
    """Whether the heads of each part of a config, given by paths, are a multiple of its key-value heads, as no transformer
    runs without. Building on the meta device does not check that."""
    pairs = ((n, values.get(path.removesuffix("num_attention_heads") + "num_key_value_heads"))
             for path, n in values.items() if path.rpartition(".")[2] == "num_attention_heads")
    return all(heads % shared == 0 for heads, shared in pairs if type(heads) is int and type(shared) is int and shared)


def smaller(build, config):
    """(config, shapes) of a model with the same names that is as small as its numbers can be made one by one."""
    shapes = build(config)
    for path, value in members(as_lists(config.to_dict())).items():
        for divisor in (16, 4, 2):
            if type(value) is not int or value < LARGE or value % divisor or path.endswith("_id"):
                continue
            values = as_lists(config.to_dict())
            values.pop("model_type", None)
            try:
                put(values, path, value // divisor)
                made = type(config)(**values)
                found = build(made) if can_attend(members(as_lists(made.to_dict()))) else {}
            except Exception:  # the config describes no model
                continue
            if found.keys() == shapes.keys():
                config, shapes = made, found
                break
    return config, shapes


def further_model(model_type, cls):
    """(config, {name in files: shape}) of a model of few layers and of some numbers that no derivation drew; None where
    transformers builds none."""
    build = Builder(cls)
    d = Derivation(model_type, cls.__name__, cls.base_model_prefix, build)
    draw = random.Random(f"further {model_type}/{cls.__name__}")
    base = d.start()
    if not base:
        return None
    fields = [f for f, v in d.values.items() if is_number(v) and v and not isinstance(v, bool) and not HARMLESS.search(f)]
    for _ in range(20):
        config = copy.deepcopy(d.base)
        for field in draw.sample(fields, min(3, len(fields))):
            put(config, field, d.values[field] * 2 if d.values[field] > 8 else d.values[field] + 1)
        config.pop("model_type", None)
        try:
            made = d.config_class(**config)
            shapes = build(made) if can_attend(members(as_lists(made.to_dict()))) else None
        except Exception:  # the config describes no model
            continue
        if shapes and shapes != base.shapes:
            return made, shapes
    return None


# ---- classes of the user's own

def classes_in(directory):
    """(the config in a directory, the model classes of its auto_map). Executes their code."""
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=True)
    names = {reference for auto, reference in getattr(config, "auto_map", {}).items() if auto.startswith("AutoModel")}
    classes = [get_class_from_dynamic_module(name, directory) for name in sorted(names)]
    classes += [getattr(transformers, name) for name in config.architectures or () if not names and hasattr(transformers, name)]
    if not classes:
        sys.exit(f"{directory}/config.json: names no model's class in auto_map, and none of transformers in architectures")
    return config, sorted(classes, key=lambda c: c.__name__ not in (config.architectures or ()))[:MAX_OWN_CLASSES]


def derive_directory(directory, table):
    config, classes = classes_in(directory)
    try:
        default = type(config)()
    except Exception:  # a class without defaults
        default = config
    line, report = derive_type(config.model_type, classes, default, [config])
    for of_class in report:
        print(said_of(of_class), flush=True)
    if line:
        pathlib.Path(table).write_text(line + "\n")
    return 0 if line else 4


def said_of(report):
    if "why" in report:
        return f"{report['class']}: no table: {report['why']}"
    known = report["sizes"] - report["unknown"]
    wrong = f"; not described: {', '.join(report['wrong'])}" if report["wrong"] else ""
    return f"{report['class']}: {report['rows']} names, {known} of {report['sizes']} sizes, {report['builds']} configs{wrong}"


if __name__ == "__main__":
    sys.stdout = sys.stderr  # the code may print
    sys.exit(derive_directory(os.path.abspath(sys.argv[1]), sys.argv[2]))

"""Tiny models under the names of litgpt, torchtune and torchtitan, made by these packages' own converters.

    pip install torch==2.15.0 transformers==5.24.0 safetensors tyro spmd_types==0.2.3
    pip download --no-deps --only-binary :all: -d WHEELS litgpt==0.5.13 torchtune==0.6.1 torchtitan==0.3.0
    pip download --no-deps --only-binary :all: -d WHEELS/older torchtitan==0.2.2
    python make.py WHEELS OUT [NAME ...]        # NAME: a key of CASES; default: all

Writes OUT/NAME/model.safetensors and config.json, and NAME.hf.json: digests of the model under Hugging Face's names,
as transformers saves it. The values are made by transformers; the packages' functions from Hugging Face's names make
the file, and where a package has the way back it must give the same values (exceptions are said below). What the
packages import besides is replaced by mocks.

torchtitan's gpt-oss adapter drops all experts (its names for them are not the model's): they are written here as its
model has them (GptOssGroupedExperts, [out, in] with gate and up in turn). Its load-balancing biases are added as the
model has them (MoE.expert_bias_E), which its adapters drop.
"""
import glob, hashlib, importlib, importlib.abc, importlib.machinery, json, os, re, shutil, subprocess, sys, tempfile, types, zipfile
from collections import defaultdict
from functools import partial
from types import SimpleNamespace as Of
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file, save_file

SMALL = dict(vocab_size=19, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=4, tie_word_embeddings=False, max_position_embeddings=32,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)
ONE = dict(SMALL, num_hidden_layers=1)
MHA = dict(SMALL, num_key_value_heads=4)
TIED = dict(SMALL, tie_word_embeddings=True)
MOE = dict(ONE, num_experts=3, num_local_experts=3, moe_intermediate_size=6, num_experts_per_tok=2, decoder_sparse_step=1)


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Whatever these packages import that is not here."""
    roots = {"lightning", "psutil", "torchao", "torchdata", "sentencepiece", "blobfile", "tiktoken", "kagglehub", "datasets",
             "omegaconf", "PIL", "requests", "litdata"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module):
        pass


def bare(name, path):
    """A package whose __init__ is not run."""
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module


def use(wheels, pattern):
    place = tempfile.mkdtemp()
    zipfile.ZipFile(glob.glob(os.path.join(wheels, pattern))[0]).extractall(place)
    sys.path.insert(0, place)
    return place


def same(a, b):
    assert a.keys() == b.keys(), (sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys()))
    for k in a:
        assert torch.equal(a[k], b[k]), k


# ---- litgpt: hf -> lit, and back if it can read its own output

def litgpt(there, back=None, mlp="LLaMAMLP", name="", check=True):
    def make(hf, c, wheels):
        place = use(wheels, "litgpt-*.whl")
        bare("litgpt", place + "/litgpt"); bare("litgpt.scripts", place + "/litgpt/scripts")
        sys.modules["litgpt.utils"] = MagicMock()
        sys.modules["litgpt"].Config = importlib.import_module("litgpt.config").Config
        to = importlib.import_module("litgpt.scripts.convert_hf_checkpoint")
        of = importlib.import_module("litgpt.scripts.convert_lit_checkpoint")
        config = Of(name=name, mlp_class_name=mlp, n_head=c["num_attention_heads"], head_size=c["head_dim"],
                    n_query_groups=c["num_key_value_heads"], vocab_size=c["vocab_size"])
        out, qkv = {}, {}
        there(to, config, qkv)(state_dict=out, hf_weights=hf)
        if back:
            again = {}
            back(of, config)(again, out)
            same({k: v for k, v in again.items() if k in hf or k != "lm_head.weight"}, hf)
        return out
    return make


def torchtune(there, back, kv_always=False):
    def make(hf, c, wheels):
        place = use(wheels, "torchtune-*.whl")
        for package in ("torchtune", "torchtune.models", "torchtune.models.qwen2", "torchtune.models.phi3", "torchtune.models.gemma2"):
            bare(package, os.path.join(place, *package.split(".")))
        numbers = dict(num_heads=c["num_attention_heads"], num_kv_heads=c["num_key_value_heads"], dim=c["hidden_size"])
        to, of = ((importlib.import_module("torchtune.models." + m), f) for m, f in (there, back))
        more = {} if kv_always else dict(head_dim=c["head_dim"])
        out = getattr(*to)(dict(hf), **numbers, **more)
        same(getattr(*of)(out, **({} if kv_always else {**numbers, **more})), hf)
        return out
    return make


def torchtitan(family, adapter, rope, moe=None, mtp=0, extra=None):
    def make(hf, c, wheels):
        use(wheels, "torchtitan-0.3*.whl")
        module = importlib.import_module(f"torchtitan.models.{family}.state_dict_adapter")
        angles = importlib.import_module("torchtitan.models.common.rope")
        kind = getattr(angles, rope)
        layer = Of(attention=Of(rope=object.__new__(kind.Config), q_lora_rank=c.get("q_lora_rank") or 0, n_heads=c["num_attention_heads"],
                                n_kv_heads=c["num_key_value_heads"], head_dim=c["head_dim"]),
                   moe=Of(num_experts=moe) if moe else None)
        config = Of(layers=[layer] * c["num_hidden_layers"], mtp_layers=[layer] * mtp, enable_weight_tying=c["tie_word_embeddings"],
                    dim=c["hidden_size"])
        out = getattr(module, adapter)(config, None).from_hf(dict(hf))
        again = getattr(module, adapter)(config, None).to_hf(out)
        if extra:
            extra(out, hf)
        dropped = ".mlp.experts." if family == "gpt_oss" else None
        same(*({k: v for k, v in t.items() if not dropped or dropped not in k} for t in (again, hf)))
        return out
    return make


def balance(out, hf, n=3, layers=1):
    for i in range(layers):
        out[f"layers.{i}.moe.expert_bias_E"] = torch.linspace(-1, 1, n)


def gpt_oss_experts(out, hf):
    """GptOssGroupedExperts: [E, 2F, D] of Hugging Face's [E, D, 2F], and [E, D, F] of its [E, F, D]."""
    at = "layers.0.moe.routed_experts.inner_experts."
    of = "model.layers.0.mlp.experts."
    for k in [k for k in out if k.startswith(at)]:
        del out[k]
    out[at + "mlp1_weight_EGD"] = hf[of + "gate_up_proj"].transpose(1, 2).contiguous()
    out[at + "mlp1_bias_EG"] = hf[of + "gate_up_proj_bias"]
    out[at + "mlp2_weight_EDF"] = hf[of + "down_proj"].transpose(1, 2).contiguous()
    out[at + "mlp2_bias_ED"] = hf[of + "down_proj_bias"]
    balance(out, hf)


def torchtitan_llama4(hf, c, wheels):
    place = use(wheels, "older/torchtitan-0.2*.whl")
    for package in ("torchtitan", "torchtitan.models", "torchtitan.models.llama4", "torchtitan.models.llama4.model"):
        bare(package, os.path.join(place, *package.split(".")))
    sys.modules["torchtitan.models.llama4.model.args"] = MagicMock()
    module = importlib.import_module("torchtitan.models.llama4.model.state_dict_adapter")
    adapter = module.Llama4StateDictAdapter(None, None)
    images = {"language_model." + k: v for k, v in hf.items()}
    out = adapter.from_hf(images)
    same(adapter.to_hf(out), images)
    out["layers.0.moe.expert_bias"] = torch.linspace(-1, 1, 3)
    return out


def llama_way(to, config, qkv): return partial(to.copy_weights_hf_llama, config, qkv)
def of_llama(of, config): return partial(of.copy_weights_llama, config)
def way(f, *needs):
    return lambda m, config, qkv: partial(getattr(m, f), *[{"config": config, "qkv": qkv}[n] for n in needs])
def back(f): return lambda m, config: partial(getattr(m, f), config)


DEEPSEEK = dict(MOE, n_routed_experts=3, n_shared_experts=1, first_k_dense_replace=0, q_lora_rank=4, kv_lora_rank=4, qk_rope_head_dim=2,
                qk_nope_head_dim=2, v_head_dim=4, head_dim=2, num_nextn_predict_layers=1, n_group=1, topk_group=1)
CASES = {
    "litgpt_llama": ("llama", SMALL, litgpt(llama_way, of_llama)),
    "litgpt_mistral_mha": ("mistral", MHA, litgpt(llama_way, of_llama)),
    "litgpt_mixtral": ("mixtral", MOE, litgpt(llama_way, of_llama, mlp="LLaMAMoE")),
    "litgpt_qwen2_tied": ("qwen2", TIED, litgpt(way("copy_weights_qwen_2_5", "config", "qkv"), back("copy_weights_qwen_2_5"))),
    "litgpt_qwen3": ("qwen3", SMALL, litgpt(way("copy_weights_qwen_3", "config", "qkv"), back("copy_weights_qwen_3"))),
    "litgpt_qwen3_moe": ("qwen3_moe", MOE, litgpt(way("copy_weights_qwen_3", "config", "qkv"), back("copy_weights_qwen_3"), mlp="LLaMAMoE")),
    "litgpt_gemma_tied": ("gemma", TIED, litgpt(llama_way, of_llama, mlp="GemmaMLP")),
    "litgpt_gemma2_tied": ("gemma2", TIED, litgpt(way("copy_weights_gemma_2", "qkv"), back("copy_weights_gemma_2"))),
    "litgpt_gemma3_tied": ("gemma3_text", TIED, litgpt(way("copy_weights_gemma_3", "qkv"), back("copy_weights_gemma_3"))),
    # Its way back expects other names of the norms than it writes.
    "litgpt_olmo2": ("olmo2", SMALL, litgpt(way("copy_weights_olmo2", "config", "qkv"))),
    "litgpt_phi": ("phi", MHA, litgpt(way("copy_weights_phi", "config", "qkv"), back("copy_weights_phi"), name="phi-2")),
    "litgpt_phi3": ("phi3", SMALL, litgpt(way("copy_weights_phi", "config", "qkv"), back("copy_weights_phi"), name="Phi-3-mini")),
    "litgpt_gpt_neox": ("gpt_neox", dict(MHA, head_dim=2), litgpt(way("copy_weights_gpt_neox", "config"), back("copy_weights_gpt_neox"))),
    "torchtune_llama": ("llama", SMALL, torchtune(("convert_weights", "hf_to_tune"), ("convert_weights", "tune_to_hf"))),
    "torchtune_mistral_mha": ("mistral", MHA, torchtune(("convert_weights", "hf_to_tune"), ("convert_weights", "tune_to_hf"))),
    "torchtune_gemma_tied": ("gemma", TIED, torchtune(("convert_weights", "hf_to_tune"), ("convert_weights", "tune_to_hf"))),
    "torchtune_gemma2_tied": ("gemma2", TIED, torchtune(("gemma2._convert_weights", "gemma2_hf_to_tune"), ("gemma2._convert_weights", "gemma2_tune_to_hf"))),
    "torchtune_qwen2_tied": ("qwen2", TIED, torchtune(("qwen2._convert_weights", "qwen2_hf_to_tune"), ("qwen2._convert_weights", "qwen2_tune_to_hf"))),
    "torchtune_phi3": ("phi3", dict(SMALL, head_dim=2), torchtune(("phi3._convert_weights", "phi3_hf_to_tune"), ("phi3._convert_weights", "phi3_tune_to_hf"), kv_always=True)),
    "torchtitan_llama3": ("llama", SMALL, torchtitan("llama3", "Llama3StateDictAdapter", "ComplexRoPE")),
    "torchtitan_qwen3_moe": ("qwen3_moe", MOE, torchtitan("qwen3", "Qwen3StateDictAdapter", "CosSinRoPE", moe=3, extra=balance)),
    "torchtitan_gpt_oss": ("gpt_oss", MOE, torchtitan("gpt_oss", "GptOssStateDictAdapter", "CosSinRoPE", moe=3, extra=gpt_oss_experts)),
    "torchtitan_deepseek_v3_mtp": ("deepseek_v3", DEEPSEEK, torchtitan("deepseek_v3", "DeepSeekV3StateDictAdapter", "ComplexRoPE", moe=3, mtp=1)),
    "torchtitan_llama4": ("llama4_text", dict(ONE, num_local_experts=3, intermediate_size_mlp=10, interleave_moe_layer_step=1), torchtitan_llama4),
}


def hugging_face(model_type, numbers):
    """The files of save_pretrained, with values of its own for every element; and their config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.for_model(model_type, **numbers)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in list(model.parameters()) + [b for n, b in model.named_buffers() if "correction_bias" in n]:
            p.copy_(torch.randn(p.shape))
    place = tempfile.mkdtemp()
    model.save_pretrained(place)
    hf = load_file(place + "/model.safetensors")
    said = json.load(open(place + "/config.json"))
    shutil.rmtree(place)
    if model_type == "deepseek_v3":  # transformers has no layer that predicts further tokens
        said["num_nextn_predict_layers"] = 1
        size = config.hidden_size
        for k in [k for k in hf if k.startswith("model.layers.0.")]:
            hf[k.replace("layers.0.", "layers.1.")] = torch.randn(hf[k].shape)
        for name, shape in (("enorm", [size]), ("hnorm", [size]), ("eh_proj", [size, 2 * size]), ("shared_head.norm", [size])):
            hf[f"model.layers.1.{name}.weight"] = torch.randn(shape)
    return hf, said


def digests(tensors):
    return {n: [{"torch.float32": "F32"}[str(t.dtype)], list(t.shape), hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()]
            for n, t in sorted(tensors.items())}


def make(name, wheels, out):
    model_type, numbers, convert = CASES[name]
    hf, config = hugging_face(model_type, numbers)
    sys.meta_path.insert(0, Mocks())
    other = convert(dict(hf), {**numbers, "head_dim": numbers["head_dim"]}, wheels)
    place = os.path.join(out, name)
    shutil.rmtree(place, ignore_errors=True)
    os.makedirs(place)
    save_file({k: v.detach().clone().contiguous() for k, v in other.items()}, place + "/model.safetensors")
    keep = {k: v for k, v in config.items() if k not in ("transformers_version",)}
    with open(place + "/config.json", "w") as f:
        json.dump(keep, f, indent=1, sort_keys=True)
    with open(place + ".hf.json", "w") as f:
        f.write("{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(x)}" for k, x in digests(hf).items()) + "\n}\n")


if __name__ == "__main__":
    wheels, out, names = sys.argv[1], sys.argv[2], sys.argv[3:]
    if len(names) == 1:
        make(names[0], wheels, out)
    else:  # each in its own process, because a process can import only one version of a package
        for name in names or CASES:
            done = subprocess.run([sys.executable, __file__, wheels, out, name])
            print(name, "ok" if done.returncode == 0 else "FAILED", flush=True)

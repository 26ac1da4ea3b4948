"""Packed weights and what the libraries that define them unpack them to, for tests/cli/unpacking_test.cc.

usage: make.py OUT [CASE...]

Wants torch, safetensors and, for the cases of each, bitsandbytes, compressed_tensors, modelopt (nvidia-modelopt). The
formulas of GPTQ, auto-round and AWQ are written out below, and compared with those of gptqmodel and auto_round if these
are installed. Runs on the CPU. OUT/CASE gets model.safetensors and config.json, OUT/CASE.expected.safetensors each
weight as "NAME:DTYPE" for each dtype of --dtype. The case llama is a whole model with an adapter.
"""
import json
import os
import sys

import torch
from safetensors.torch import save_file

CASES = {}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def case(function):
    CASES[function.__name__] = function
    return function


def floats(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype)


# ---- bitsandbytes

def bitsandbytes4(quant_type, nested, dtype, shapes, blocksize=64):
    import bitsandbytes.functional as F

    stored, expected = {}, {}
    for i, shape in enumerate(shapes):
        name = f"layers.{i}.proj.weight"
        packed, state = F.quantize_4bit(floats(*shape, dtype=dtype), blocksize=blocksize, compress_statistics=nested,
                                        quant_type=quant_type)
        stored[name] = packed
        for key, value in state.as_dict(packed=True).items():
            stored[f"{name}.{key}"] = value
        expected[name] = F.dequantize_4bit(packed, state)
    return stored, expected, {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
                              "bnb_4bit_quant_type": quant_type, "bnb_4bit_use_double_quant": nested}


@case
def bitsandbytes_nf4():
    return bitsandbytes4("nf4", False, torch.bfloat16, [(16, 64), (5, 26), (3, 7)])


@case
def bitsandbytes_nf4_nested():
    return bitsandbytes4("nf4", True, torch.float16, [(40, 64), (24, 18)], blocksize=32)


@case
def bitsandbytes_fp4():
    return bitsandbytes4("fp4", False, torch.float32, [(16, 64), (6, 10)])


@case
def bitsandbytes_fp4_nested():
    # bitsandbytes 0.50's kernel for AVX-512 gets blocks wrong that are longer than a row.
    return bitsandbytes4("fp4", True, torch.bfloat16, [(16, 128)], blocksize=128)


@case
def bitsandbytes_int8():
    import bitsandbytes.functional as F

    stored, expected = {}, {}
    for i, shape in enumerate([(16, 40), (3, 5)]):
        rows, scales, _ = F.int8_vectorwise_quant(floats(*shape, dtype=torch.float16))
        stored[f"layers.{i}.proj.weight"] = rows
        stored[f"layers.{i}.proj.SCB"] = scales
        stored[f"layers.{i}.proj.weight_format"] = torch.tensor(0, dtype=torch.uint8)
        expected[f"layers.{i}.proj.weight"] = F.int8_vectorwise_dequant(rows, scales)
    return stored, expected, {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}


# ---- GPTQ: GPTQModel's PackableQuantLinear.dequantize_weight, which needs no more than the module's tensors

def words(*shape):
    return torch.randint(-2**31, 2**31, shape, dtype=torch.int64).to(torch.int32)


def gptq_layer(bits, inputs, outputs, group_size, is_v1, g_idx, scale_dtype=torch.float16):
    groups = -(-inputs // group_size)
    layer = {"qweight": words(inputs * bits // 32, outputs), "qzeros": words(groups, outputs * bits // 32),
             "scales": (torch.rand(groups, outputs) * 0.01 + 0.001).to(scale_dtype), "g_idx": g_idx.to(torch.int32)}
    return layer, dequantize_gptq(layer, bits, is_v1)


def fields(packed, bits, dim):
    """The fields of a stream of 32-bit words along a dimension."""
    packed = packed.movedim(dim, -1).to(torch.int64) & 0xFFFFFFFF
    bit = (packed[..., None] >> torch.arange(32)) & 1
    bit = bit.flatten(-2).unflatten(-1, (-1, bits))
    return (bit << torch.arange(bits)).sum(-1).movedim(-1, dim).to(torch.int32)


def dequantize_gptq(layer, bits, is_v1):
    from_library = library_gptq(layer, bits, is_v1)
    zeros = (fields(layer["qzeros"], bits, 1) + int(is_v1)) & (2**bits - 1)
    g = layer["g_idx"].long()
    ours = (layer["scales"][g] * (fields(layer["qweight"], bits, 0) - zeros[g])).t().contiguous()
    if from_library is not None:
        assert torch.equal(ours, from_library), "GPTQModel"
    return ours


def library_gptq(layer, bits, is_v1):
    """What GPTQModel's own module gives; nothing if it is not installed."""
    try:
        from gptqmodel.nn_modules.qlinear import PackableQuantLinear
        from gptqmodel.utils.model_dequant import _correct_gptq_v1_qzeros
    except ImportError:
        return None
    module = PackableQuantLinear.__new__(PackableQuantLinear)
    torch.nn.Module.__init__(module)
    module.bits, module.pack_factor, module.maxq, module.pack_dtype_bits = bits, 32 // bits, 2**bits - 1, 32
    module.dequant_dtype = torch.int16 if bits == 8 else torch.int8
    module.planar, module.enable_wf_unsqueeze = False, True
    for key, value in layer.items():
        module.register_buffer(key, value)
    if is_v1:
        module.qzeros = _correct_gptq_v1_qzeros(module.qzeros, bits)
    return module.dequantize_weight().t().contiguous()


def in_order(inputs, group_size):
    return torch.arange(inputs) // group_size


def gptq(bits, layers, is_v1=True, desc_act=False, group_size=32, **config):
    stored, expected = {}, {}
    for i, (inputs, outputs) in enumerate(layers):
        g_idx = in_order(inputs, group_size)
        if desc_act:
            g_idx = g_idx[torch.randperm(inputs)]
        layer, weight = gptq_layer(bits, inputs, outputs, group_size, is_v1, g_idx,
                                   torch.bfloat16 if i == 1 else torch.float16)
        for key, value in layer.items():
            stored[f"layers.{i}.proj.{key}"] = value
        expected[f"layers.{i}.proj.weight"] = weight
    return stored, expected, {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act,
                              "sym": False, **config}


@case
def gptq_4bit():
    return gptq(4, [(64, 32), (96, 8)], checkpoint_format="gptq")


@case
def gptq_4bit_act_order():
    return gptq(4, [(64, 32), (80, 16)], desc_act=True)


@case
def gptq_4bit_v2():
    return gptq(4, [(64, 32)], is_v1=False, checkpoint_format="gptq_v2")


@case
def gptq_8bit():
    return gptq(8, [(64, 32)], checkpoint_format="gptq")


@case
def gptq_2bit():
    return gptq(2, [(64, 32)], checkpoint_format="gptq")


@case
def gptq_3bit():
    return gptq(3, [(64, 32)], checkpoint_format="gptq")


@case
def gptq_without_g_idx():
    stored, expected, config = gptq(4, [(64, 32)])
    return {k: v for k, v in stored.items() if not k.endswith("g_idx")}, expected, config


# ---- auto-round: the same tensors. Zero points are stored as they are, or less 1 (auto_round:auto_gptq)

def auto_round(bits, packing, layers=((64, 32), (96, 64))):
    stored, expected, config = gptq(bits, list(layers), is_v1="auto_gptq" in packing)
    stored = {k: v.half() if k.endswith("scales") else v for k, v in stored.items()}
    try:
        from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
        library = qlinear_torch_zp if "auto_gptq" in packing else qlinear_torch
    except ImportError:
        library = None
    for i, (inputs, outputs) in enumerate(layers):
        layer = {k: stored[f"layers.{i}.proj.{k}"] for k in ("qweight", "qzeros", "scales", "g_idx")}
        if "auto_gptq" in packing:  # it never stores the largest zero point
            layer["qzeros"] &= 0x77777777
        expected[f"layers.{i}.proj.weight"] = dequantize_gptq(layer, bits, "auto_gptq" in packing)
        if not packing.endswith("gptqmodel"):
            del stored[f"layers.{i}.proj.g_idx"]
        if library:
            module = library.QuantLinear(bits, 32, inputs, outputs, False)
            module.qweight, module.qzeros, module.scales = layer["qweight"], layer["qzeros"], layer["scales"]
            weight = module(torch.eye(inputs, dtype=torch.float16)).t()
            assert torch.equal(weight, expected[f"layers.{i}.proj.weight"]), "auto-round"
    del config["desc_act"]
    return stored, expected, {**config, "quant_method": "auto-round", "packing_format": packing}


@case
def auto_round_4bit():
    return auto_round(4, "auto_round")


@case
def auto_round_4bit_auto_gptq():
    return auto_round(4, "auto_round:auto_gptq")


@case
def auto_round_4bit_gptqmodel():
    return auto_round(4, "auto_round:gptqmodel")


@case
def auto_round_5bit():
    return auto_round(5, "auto_round")


@case
def auto_round_6bit():
    return auto_round(6, "auto_round")


@case
def auto_round_7bit():
    return auto_round(7, "auto_round")


# ---- AWQ: AutoAWQ's awq/utils/packing_utils.py, dequantize_gemm

def dequantize_awq(qweight, qzeros, scales, group_size):
    order = [0, 4, 1, 5, 2, 6, 3, 7]

    def unpacked(packed):
        return ((packed[:, :, None] >> torch.arange(0, 32, 4)) & 0xF)[:, :, order].flatten(1).to(torch.int8)

    repeat = lambda t: t.repeat_interleave(group_size, dim=0)
    ours = ((unpacked(qweight) - repeat(unpacked(qzeros))) * repeat(scales)).t().contiguous()
    try:
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
        assert torch.equal(ours, dequantize_gemm(qweight, qzeros, scales, 4, group_size).t()), "AWQ"
    except ImportError:
        pass
    return ours


@case
def awq():
    stored, expected = {}, {}
    for i, (inputs, outputs, dtype) in enumerate([(64, 32, torch.float16), (96, 8, torch.bfloat16)]):
        layer = {"qweight": words(inputs, outputs // 8), "qzeros": words(inputs // 32, outputs // 8),
                 "scales": (torch.rand(inputs // 32, outputs) * 0.01 + 0.001).to(dtype)}
        for key, value in layer.items():
            stored[f"layers.{i}.proj.{key}"] = value
        expected[f"layers.{i}.proj.weight"] = dequantize_awq(**layer, group_size=32)
    return stored, expected, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


# ---- compressed-tensors

def compressed(layers, compressor, form, activations=None, **weights):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args,
                                input_activations=QuantizationArgs(**activations) if activations else None)
    stored, expected = {}, {}
    for i, tensors in enumerate(layers):
        packed = compressor.compress(dict(tensors), scheme)
        for key, value in packed.items():
            stored[f"layers.{i}.proj.{key}"] = value.detach().contiguous()
        expected[f"layers.{i}.proj.weight"] = compressor.decompress(dict(packed), scheme)["weight"]
    group = json.loads(scheme.model_dump_json())
    return stored, expected, {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
                              "config_groups": {"group_0": group}, "ignore": []}


def integers(outputs, inputs, groups, bits, is_symmetric, dtype=torch.bfloat16):
    out = {"weight": floats(outputs, inputs, dtype=dtype),
           "weight_scale": (torch.rand(outputs, groups) * 0.2 + 0.1).to(dtype)}
    if not is_symmetric:
        half = 2 ** (bits - 1)
        out["weight_zero_point"] = torch.randint(-half, half, (outputs, groups)).to(torch.int8)
    return out


def pack_quantized(bits, is_symmetric, group_size, shapes):
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor

    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    layers = [integers(outputs, inputs, inputs // group_size if group_size else 1, bits, is_symmetric, dtypes[i % 3])
              for i, (outputs, inputs) in enumerate(shapes)]
    strategy = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    return compressed(layers, PackedQuantizationCompressor, "pack-quantized", num_bits=bits, type="int",
                      symmetric=is_symmetric, **strategy)


@case
def compressed_int4_group():
    return pack_quantized(4, True, 16, [(12, 64), (5, 48)])


@case
def compressed_int4_group_zero_points():
    return pack_quantized(4, False, 16, [(12, 64), (10, 48), (9, 32)])


@case
def compressed_int4_channel():
    return pack_quantized(4, True, 0, [(12, 64), (5, 43)])


@case
def compressed_int8_channel_zero_points():
    return pack_quantized(8, False, 0, [(12, 40), (5, 34)])


@case
def compressed_int3_group():
    return pack_quantized(3, False, 16, [(12, 64), (7, 48)])


@case
def compressed_int4_act_order():
    """Inputs in the order of their activations: what versions to 0.13 write, whose groups are of the g_idx."""
    stored, expected, config = pack_quantized(4, False, 16, [(12, 64)])
    order = torch.randperm(64)
    groups = (torch.arange(64) // 16)[order]
    # Input i of the weight is input order[i] of the ordered one, in the same group.
    from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
    values = unpack_from_int32(stored["layers.0.proj.weight_packed"], 4, torch.Size([12, 64]))[:, order]
    stored["layers.0.proj.weight_packed"] = pack_to_int32(values.contiguous(), 4)
    stored["layers.0.proj.weight_g_idx"] = groups.to(torch.int32)
    expected["layers.0.proj.weight"] = expected["layers.0.proj.weight"][:, order].contiguous()
    return stored, expected, config


def int_quantized(is_symmetric, strategy, dtype):
    from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor

    layers = [integers(outputs, inputs, 1, 8, is_symmetric, dtype) for outputs, inputs in [(12, 40), (5, 33)]]
    if strategy == "tensor":
        for layer in layers:
            for key in ("weight_scale", "weight_zero_point"):
                if key in layer:
                    layer[key] = layer[key][0, :1].clone()
    return compressed(layers, IntQuantizationCompressor, "int-quantized", num_bits=8, type="int",
                      symmetric=is_symmetric, strategy=strategy,
                      activations={"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"})


@case
def compressed_int8():
    return int_quantized(True, "channel", torch.bfloat16)


@case
def compressed_int8_zero_points():
    return int_quantized(False, "channel", torch.float16)


@case
def compressed_int8_tensor():
    return int_quantized(True, "tensor", torch.bfloat16)


def float8_scales(*shape):
    return (torch.rand(*shape) * 100 + 0.01).to(torch.float8_e4m3fn)


@case
def compressed_nvfp4():
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    stored, expected = {}, {}
    for i, (outputs, inputs) in enumerate([(12, 64), (5, 48)]):
        packed = {"weight_packed": torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8),
                  "weight_scale": float8_scales(outputs, inputs // 16),
                  # torch promotes by a tensor of one dimension, but not by one without dimensions.
                  "weight_global_scale": torch.tensor([1234.567] if i == 0 else 1235.678)}
        for key, value in packed.items():
            stored[f"layers.{i}.proj.{key}"] = value
        stored[f"layers.{i}.proj.input_global_scale"] = torch.tensor([12.5])
        expected[f"layers.{i}.proj.weight"] = NVFP4PackedCompressor.decompress(packed, scheme)["weight"]
    group = json.loads(scheme.model_dump_json())
    return stored, expected, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                              "config_groups": {"group_0": group}, "ignore": []}


@case
def compressed_mxfp4():
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    stored, expected = {}, {}
    for i, (outputs, inputs) in enumerate([(12, 64), (5, 96)]):
        packed = {"weight_packed": torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8),
                  "weight_scale": torch.randint(1, 250, (outputs, inputs // 32), dtype=torch.uint8)}
        packed["weight_scale"][0, :2] = torch.tensor([0, 254], dtype=torch.uint8)
        for key, value in packed.items():
            stored[f"layers.{i}.proj.{key}"] = value
        expected[f"layers.{i}.proj.weight"] = MXFP4PackedCompressor.decompress(packed, scheme)["weight"]
    group = json.loads(scheme.model_dump_json())
    return stored, expected, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
                              "config_groups": {"group_0": group}, "ignore": []}


@case
def compressed_mxfp6():
    from compressed_tensors.compressors.mxfp6 import MXFP6PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = {"num_bits": 6, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    stored, expected = {}, {}
    for i, (outputs, inputs) in enumerate([(12, 64), (5, 96)]):
        packed = {"weight_packed": torch.randint(0, 256, (outputs, inputs // 4 * 3), dtype=torch.uint8),
                  "weight_scale": torch.randint(1, 250, (outputs, inputs // 32), dtype=torch.uint8)}
        packed["weight_scale"][0, :2] = torch.tensor([0, 254], dtype=torch.uint8)
        for key, value in packed.items():
            stored[f"layers.{i}.proj.{key}"] = value
        expected[f"layers.{i}.proj.weight"] = MXFP6PackedCompressor.decompress(packed, scheme)["weight"]
    group = json.loads(scheme.model_dump_json())
    return stored, expected, {"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized",
                              "config_groups": {"group_0": group}, "ignore": []}


@case
def compressed_mxfp8():
    from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
            "scale_dtype": "torch.uint8"}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    stored, expected = {}, {}
    for i, (outputs, inputs) in enumerate([(12, 64), (5, 96)]):
        codes = torch.randint(0, 255, (outputs, inputs), dtype=torch.uint8)
        packed = {"weight": torch.where(codes == 127, 0, codes).view(torch.float8_e4m3fn),  # no NaN
                  "weight_scale": torch.randint(1, 250, (outputs, inputs // 32), dtype=torch.uint8)}
        packed["weight_scale"][0, :2] = torch.tensor([0, 254], dtype=torch.uint8)
        for key, value in packed.items():
            stored[f"layers.{i}.proj.{key}"] = value
        expected[f"layers.{i}.proj.weight"] = MXFP8QuantizationCompressor.decompress(dict(packed), scheme)["weight"]
    group = json.loads(scheme.model_dump_json())
    return stored, expected, {"quant_method": "compressed-tensors", "format": "mxfp8-quantized",
                              "config_groups": {"group_0": group}, "ignore": []}


@case
def modelopt_nvfp4():
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    stored, expected = {}, {}
    for i, (outputs, inputs) in enumerate([(12, 64), (5, 48)]):
        name = f"layers.{i}.proj.weight"
        packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
        scale, scale_2 = float8_scales(outputs, inputs // 16), torch.tensor(0.000123 * (i + 1))
        stored.update({name: packed, name + "_scale": scale, name + "_scale_2": scale_2,
                       f"layers.{i}.proj.input_scale": torch.tensor(0.0123)})
        tensor = NVFP4QTensor((outputs, inputs), torch.float32, packed)
        for dtype in DTYPES:
            expected[f"{name}:{str(dtype)[6:]}"] = tensor.dequantize(dtype, scale=scale, double_scale=scale_2,
                                                                     block_sizes={-1: 16})
    return stored, expected, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


def make_llama(out):
    """A model that transformers quantized with bitsandbytes, an adapter, and what PEFT merges it to. Wants transformers,
    accelerate and peft as well."""
    import tempfile

    import bitsandbytes.functional as F
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=16, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)
    with tempfile.TemporaryDirectory() as plain:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(plain)
        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
                                 bnb_4bit_use_double_quant=True)
        packed = AutoModelForCausalLM.from_pretrained(plain, quantization_config=how, device_map="cpu")
        packed.save_pretrained(f"{out}/llama")
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        of_packed = dict(packed.named_parameters())
        for key, value in model.named_parameters():
            if getattr(of_packed[key], "quant_state", None) is not None:
                value.data = F.dequantize_4bit(of_packed[key].data, of_packed[key].quant_state)
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"],
                                                      init_lora_weights=False))
    lora.peft_config["default"].base_model_name_or_path = None
    lora.save_pretrained(f"{out}/llama.adapter")
    merged = lora.merge_and_unload().state_dict()
    save_file({k: v.contiguous() for k, v in merged.items()}, f"{out}/llama.merged.safetensors")
    for extra in ("llama/generation_config.json", "llama.adapter/README.md"):
        if os.path.exists(f"{out}/{extra}"):
            os.remove(f"{out}/{extra}")


def make(out, name):
    if name == "llama":
        return make_llama(out)
    torch.manual_seed(len(name))
    stored, expected, quantization = CASES[name]()
    stored["norm.weight"] = floats(8, dtype=torch.bfloat16)
    for key, value in list(expected.items()):
        if ":" not in key:
            for dtype in DTYPES:
                expected[f"{key}:{str(dtype)[6:]}"] = value.to(dtype)
            del expected[key]
    os.makedirs(f"{out}/{name}", exist_ok=True)
    save_file({k: v.contiguous() for k, v in stored.items()}, f"{out}/{name}/model.safetensors", {"format": "pt"})
    save_file({k: v.contiguous() for k, v in expected.items()}, f"{out}/{name}.expected.safetensors")
    with open(f"{out}/{name}/config.json", "w") as f:
        json.dump({"model_type": "packed_test", "dtype": "bfloat16", "quantization_config": quantization}, f, indent=1)


if __name__ == "__main__":
    for name in sys.argv[2:] or [*CASES, "llama"]:
        make(sys.argv[1], name)

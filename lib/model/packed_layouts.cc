// SPDX-License-Identifier: Apache-2.0
#include "lib/model/packed_layouts.h"

namespace reshard {
namespace {

using enum PackedDType;
using enum PackedName;
using Rest = PackedLayout::Rest;

constexpr bool kSign = true, kProof = true, kNeeded = true, kNot = false;

// bitsandbytes nn/modules.py, Linear4bit._save_to_state_dict: names of QuantState.as_dict(packed=True).
constexpr PackedRole kBitsandbytes4Roles[] = {
    {"weight", kAfter, "", kAny, kNot, kNot, kNeeded},  // the dtype is bnb_4bit_quant_storage
    {"absmax", kAfter, ".absmax", kAny, kSign, kProof, kNeeded},
    {"quant_map", kAfter, ".quant_map", kAny, kSign, kProof, kNeeded},
    {"nested_absmax", kAfter, ".nested_absmax", kAny, kSign, kProof},
    {"nested_quant_map", kAfter, ".nested_quant_map", kAny, kSign, kProof},
    {"quant_state", kAfter, ".quant_state.bitsandbytes__nf4", kUint8, kSign, kProof, kNeeded},
    {"quant_state", kAfter, ".quant_state.bitsandbytes__fp4", kUint8, kSign, kProof, kNeeded},
};
// bitsandbytes nn/modules.py, Linear8bitLt._save_to_state_dict.
constexpr PackedRole kBitsandbytes8Roles[] = {
    {"weight", kAfter, "", kInt8, kNot, kNot, kNeeded},
    {"SCB", kInModule, "SCB", kAny, kSign, kProof, kNeeded},
    {"weight_format", kInModule, "weight_format"},
};
// gptqmodel nn_modules/qlinear/__init__.py, register_buffers; AutoAWQ awq/modules/linear/gemm.py has no g_idx.
constexpr PackedRole kGptqRoles[] = {
    {"qweight", kInModule, "qweight", kInteger, kSign, kProof, kNeeded},
    {"qzeros", kInModule, "qzeros", kAny, kSign, kProof, kNeeded},
    {"scales", kInModule, "scales", kFloat, kNot, kNot, kNeeded},
    {"g_idx", kInModule, "g_idx", kInteger, kSign, kProof},
};
// AutoAWQ awq/modules/linear/gemm.py, WQLinear_GEMM.
constexpr PackedRole kAwqRoles[] = {
    {"qweight", kInModule, "qweight", kInteger, kSign, kProof, kNeeded},
    {"qzeros", kInModule, "qzeros", kAny, kSign, kProof, kNeeded},
    {"scales", kInModule, "scales", kFloat, kNot, kNot, kNeeded},
};
// compressed-tensors compressors/nvfp4/base.py.
constexpr PackedRole kCompressedNvfp4Roles[] = {
    {"packed", kAfter, "_packed", kUint8, kSign, kProof, kNeeded},
    {"scale", kAfter, "_scale", kFloat8, kNot, kNot, kNeeded},
    {"global_scale", kAfter, "_global_scale", kFloat, kSign, kNot, kNeeded},
};
// compressed-tensors compressors/mxfp4/base.py; mxfp6/base.py has the same names.
constexpr PackedRole kCompressedMxfp4Roles[] = {
    {"packed", kAfter, "_packed", kUint8, kSign, kProof, kNeeded},
    {"scale", kAfter, "_scale", kExponent, kNot, kNot, kNeeded},
};
// compressed-tensors compressors/mxfp8/base.py.
constexpr PackedRole kCompressedMxfp8Roles[] = {
    {"weight", kAfter, "", PackedDType::kFloat8, kNot, kProof, kNeeded},
    {"scale", kAfter, "_scale", kUint8, kSign, kNot, kNeeded},
};
// compressed-tensors compressors/pack_quantized/base.py.
constexpr PackedRole kCompressedPackedRoles[] = {
    {"packed", kAfter, "_packed", kInt32, kSign, kProof, kNeeded},
    {"scale", kAfter, "_scale", kFloat, kNot, kNot, kNeeded},
    {"zero_point", kAfter, "_zero_point", kInteger},
    {"shape", kAfter, "_shape", kInteger, kSign, kNot, kNeeded},
    {"g_idx", kAfter, "_g_idx", kInteger},
};
// compressed-tensors compressors/quantized_compressors, Marlin24Compressor.
constexpr PackedRole kCompressedMarlin24Roles[] = {
    {"packed", kAfter, "_packed", kInt32, kNot, kNot, kNeeded},
    {"scale", kInModule, "scale_packed", kFloat, kSign, kProof, kNeeded},
    {"meta", kInModule, "meta", kInteger, kNot, kNot, kNeeded},
};
// compressed-tensors compressors/sparse_compressors, Sparse24BitMaskCompressor and BitmaskCompressor.
constexpr PackedRole kCompressedSparseRoles[] = {
    {"compressed", kAfter, ".compressed", kAny, kNot, kNot, kNeeded},
    {"bitmask", kAfter, ".bitmask", kByte, kSign, kProof, kNeeded},
    {"row_offsets", kAfter, ".row_offsets", kInteger},
    {"shape", kAfter, ".shape", kInteger, kNot, kNot, kNeeded},
    {"scale", kAfter, "_scale", kFloat},
};
// NVIDIA ModelOpt modelopt/torch/export/quant_utils.py; experts in one tensor have the names with "weight".
constexpr PackedRole kModeloptNvfp4Roles[] = {
    {"weight", kAfter, "", kUint8, kNot, kProof, kNeeded},
    {"scale", kAfter, "_scale", kFloat8, kSign, kNot, kNeeded},
    {"scale", kAfter, "_weight_scale", kFloat8, kSign, kNot, kNeeded},
    {"scale_2", kAfter, "_scale_2", kFloat, kSign, kNot, kNeeded},
    {"scale_2", kAfter, "_weight_scale_2", kFloat, kSign, kNot, kNeeded},
    {"input_scale", kAfter, "_input_scale", kFloat},
};
// openai/gpt-oss gpt_oss/torch/weights.py.
constexpr PackedRole kMxfp4Roles[] = {
    {"blocks", kAfter, "_blocks", kUint8, kSign, kProof, kNeeded},
    {"scales", kAfter, "_scales", kUint8, kSign, kProof, kNeeded},
};
// hqq core/quantize.py, HQQLinear.state_dict; sinq sinq/sinqlinear.py.
constexpr PackedRole kHqqRoles[] = {
    {"W_q", kInModule, "W_q", kAny, kSign, kProof, kNeeded},
    {"scale", kInModule, "scale"},
    {"zero", kInModule, "zero"},
    {"shape", kInModule, "shape"},
};
// optimum-quanto tensor/weights/qbytes.py and qbits.py, save_to_state_dict.
constexpr PackedRole kQuantoRoles[] = {
    {"data", kAfter, "._data._data", kAny, kSign, kProof, kNeeded},
    {"data", kAfter, "._data", kAny, kSign, kProof, kNeeded},
    {"scale", kAfter, "._scale", kAny, kSign, kProof, kNeeded},
    {"shift", kAfter, "._shift", kAny, kSign, kProof},
};
// torchao prototype/safetensors/safetensors_support.py, flatten_tensor_state_dict: the subclasses' tensor_data_names.
constexpr PackedRole kTorchaoRoles[] = {
    {"qdata", kFlattened, "_qdata", kAny, kSign, kProof, kNeeded},
    {"qdata", kFlattened, "_qdata_and_metadata", kAny, kSign, kProof, kNeeded},
    {"qdata", kFlattened, "_packed_weights", kAny, kSign, kProof, kNeeded},
    {"qdata", kAfter, ":qdata", kAny, kSign, kProof, kNeeded},
    {"qdata", kAfter, ":_data", kAny, kSign, kProof, kNeeded},
    {"scale", kFlattened, "_scale", kAny, kSign, kProof},
    {"scale", kFlattened, "_scale_and_zero", kAny, kSign, kProof},
    {"scale", kAfter, ":scale", kAny, kSign, kProof},
    {"zero_point", kFlattened, "_zero_point", kAny, kSign, kProof},
    {"zero_point", kAfter, ":zero_point", kAny, kSign, kProof},
};
// AQLM inference_lib/src/aqlm/inference.py, QuantizedLinear.
constexpr PackedRole kAqlmRoles[] = {
    {"codes", kInModule, "codes", kInteger, kSign, kProof, kNeeded},
    {"codebooks", kInModule, "codebooks", kAny, kSign, kProof, kNeeded},
    {"scales", kInModule, "scales", kAny, kNot, kNot, kNeeded},
};
// VPTQ vptq/layers/vqlinear.py, VQuantLinear.
constexpr PackedRole kVptqRoles[] = {
    {"indices", kInModule, "indices", kAny, kSign, kNot, kNeeded},
    {"centroids", kInModule, "centroids.weight", kAny, kSign, kProof, kNeeded},
    {"res_centroids", kInModule, "res_centroids.weight", kAny, kSign, kProof},
};
// SpQR inference_lib/src/spqr_quant/inference.py, QuantizedLinear.
constexpr PackedRole kSpqrRoles[] = {
    {"dense_weights", kInModule, "dense_weights", kAny, kSign, kProof, kNeeded},
    {"row_offsets", kInModule, "row_offsets", kInteger},
    {"col_vals", kInModule, "col_vals", kInteger},
    {"in_perm", kInModule, "in_perm"},
};
// transformers integrations/higgs.py, HiggsLinear.
constexpr PackedRole kHiggsRoles[] = {
    {"weight", kAfter, "", kInteger, kNot, kProof, kNeeded},
    {"scales", kInModule, "scales", kFloat, kNot, kNot, kNeeded},
    {"tables", kInModule, "tables", kFloat, kSign, kNot, kNeeded},
    {"tables2", kInModule, "tables2", kFloat, kSign, kNot, kNeeded},
};
// fp_quant inference_lib/src/fp_quant/module/linear.py, FPQuantLinear.
constexpr PackedRole kFpQuantRoles[] = {
    {"qweight", kInModule, "qweight", kAny, kNot, kNot, kNeeded},
    {"scales", kInModule, "scales", kAny, kNot, kNot, kNeeded},
    {"forward_hadamard_matrix", kInModule, "forward_hadamard_matrix", kAny, kSign, kProof},
    {"backward_hadamard_matrix", kInModule, "backward_hadamard_matrix", kAny, kSign, kProof},
    {"weight_global_scale", kInModule, "weight_global_scale"},
    {"act_global_scale", kInModule, "act_global_scale"},
    {"dqweight", kInModule, "dqweight"},
};
// EETQ python/eetq/modules/qlinear.py; transformers integrations/eetq.py.
constexpr PackedRole kEetqRoles[] = {
    {"weight", kAfter, "", kInt8, kNot, kProof, kNeeded},
    {"scales", kAfter, "_scales", kFloat, kSign, kNot, kNeeded},
};
// exllamav2 conversion/compile.py.
constexpr PackedRole kExl2Roles[] = {
    {"q_weight", kInModule, "q_weight", kInteger, kSign, kProof, kNeeded},
    {"q_scale", kInModule, "q_scale", kInteger, kNot, kProof, kNeeded},
    {"q_scale_max", kInModule, "q_scale_max", kAny, kSign, kNot, kNeeded},
    {"q_groups", kInModule, "q_groups", kInteger, kSign, kProof, kNeeded},
    {"q_group_map", kInModule, "q_group_map"},
    {"q_invperm", kInModule, "q_invperm"},
    {"q_perm", kInModule, "q_perm"},
};
// exllamav3 modules/quant/exl3.py.
constexpr PackedRole kExl3Roles[] = {
    {"trellis", kInModule, "trellis", kInteger, kSign, kProof, kNeeded},
    {"suh", kInModule, "suh", kAny, kSign, kNot},
    {"svh", kInModule, "svh", kAny, kSign, kNot},
    {"su", kInModule, "su"},
    {"sv", kInModule, "sv"},
    {"mcg", kInModule, "mcg"},
    {"mul1", kInModule, "mul1"},
};
// mlx python/mlx/nn/layers/quantized.py; transformers integrations/metal_quantization.py.
constexpr PackedRole kAffineRoles[] = {
    {"weight", kAfter, "", kUint32, kNot, kProof, kNeeded},
    {"scales", kInModule, "scales", kAny, kSign, kNot, kNeeded},
    {"biases", kInModule, "biases", kAny, kSign},
    {"biases", kInModule, "qbiases", kAny, kSign},
};
// transformers integrations/bitnet.py, BitLinear.
constexpr PackedRole kBitnetRoles[] = {
    {"weight", kAfter, "", kUint8, kNot, kNot, kNeeded},
    {"scale", kAfter, "_scale", kFloat, kNot, kNot, kNeeded},
};
// compressed-tensors compressors/naive_quantized/base.py; quark torch/export/nn/modules; transformers
// integrations/gemma_quant.py.
constexpr PackedRole kIntegerRoles[] = {
    {"weight", kAfter, "", kInteger, kNot, kProof, kNeeded},
    {"weight", kInModule, "embedding_quantized", kByte, kNot, kProof, kNeeded},
    {"scale", kAfter, "_scale", kAny, kSign, kNot, kNeeded},
    {"scale", kInModule, "embedding_scale", kAny, kSign, kNot, kNeeded},
    {"zero_point", kAfter, "_zero_point", kAny, kSign},
};
// transformers integrations/finegrained_fp8.py; compressed-tensors float-quantized; fbgemm; ModelOpt FP8.
constexpr PackedRole kFloat8Roles[] = {
    {"weight", kAfter, "", PackedDType::kFloat8, kNot, kProof, kNeeded},
    {"scale", kAfter, "_scale_inv", kAny, kSign, kNot, kNeeded},
    {"scale", kAfter, "_scale", kAny, kSign, kNot, kNeeded},
    {"scale", kAfter, "_weight_scale", kAny, kSign, kNot, kNeeded},
    {"scale", kInModule, "scale", kAny, kSign, kNot, kNeeded},
    {"input_scale", kAfter, "_input_scale", kFloat},
};
// ggml src/ggml.c, type_traits: a tensor in blocks, whose name ends in its type.
constexpr PackedRole kGgmlRoles[] = {
    {"blocks", kAfter, ":Q4_0", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":Q4_1", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":Q5_0", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":Q5_1", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":Q8_0", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":Q8_1", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":Q2_K", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":Q3_K", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":Q4_K", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":Q5_K", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":Q6_K", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":Q8_K", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":IQ2_XXS", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":IQ2_XS", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":IQ3_XXS", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":IQ1_S", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":IQ4_NL", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":IQ3_S", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":IQ2_S", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":IQ4_XS", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":IQ1_M", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":TQ1_0", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":TQ2_0", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":MXFP4", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":NVFP4", kUint8, kSign, kProof, kNeeded},
    {"blocks", kAfter, ":Q1_0", kUint8, kSign, kProof, kNeeded},
};

constexpr std::string_view kBitsandbytesMethods[] = {"bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"};
constexpr std::string_view kGptqMethods[] = {"gptq", "auto-round", "auto_round", "intel/auto-round", "marlin"};
constexpr std::string_view kAwqMethods[] = {"awq"};
constexpr std::string_view kCompressedMethods[] = {"compressed-tensors", "compressed_tensors"};
constexpr std::string_view kModeloptMethods[] = {"modelopt", "modelopt_fp4", "nvfp4"};
constexpr std::string_view kMxfp4Methods[] = {"mxfp4"};
constexpr std::string_view kHqqMethods[] = {"hqq", "sinq"};
constexpr std::string_view kQuantoMethods[] = {"quanto"};
constexpr std::string_view kTorchaoMethods[] = {"torchao"};
constexpr std::string_view kAqlmMethods[] = {"aqlm"};
constexpr std::string_view kVptqMethods[] = {"vptq"};
constexpr std::string_view kSpqrMethods[] = {"spqr"};
constexpr std::string_view kHiggsMethods[] = {"higgs"};
constexpr std::string_view kFpQuantMethods[] = {"fp_quant"};
constexpr std::string_view kEetqMethods[] = {"eetq"};
constexpr std::string_view kExl2Methods[] = {"exl2"};
constexpr std::string_view kExl3Methods[] = {"exl3"};
constexpr std::string_view kAffineMethods[] = {"metal", "mlx"};
constexpr std::string_view kBitnetMethods[] = {"bitnet"};
constexpr std::string_view kIntegerMethods[] = {"compressed-tensors", "compressed_tensors", "quark", "gemma"};
constexpr std::string_view kFloat8Methods[] = {"fp8", "fbgemm_fp8", "modelopt", "quark", "compressed-tensors"};

constexpr PackedLayout kLayouts[] = {
    {Packing::kBitsandbytes4, "bitsandbytes 4-bit", kBitsandbytesMethods, kBitsandbytes4Roles, Rest::kNone, 2},
    {Packing::kBitsandbytes8, "bitsandbytes 8-bit", kBitsandbytesMethods, kBitsandbytes8Roles, Rest::kNone, 1},
    {Packing::kFpQuant, "FP-Quant", kFpQuantMethods, kFpQuantRoles},
    {Packing::kGptq, "GPTQ", kGptqMethods, kGptqRoles},
    {Packing::kAwq, "AWQ", kAwqMethods, kAwqRoles},  // set by refine() in quantization.cc
    {Packing::kCompressedMarlin24, "compressed-tensors marlin-24", kCompressedMethods, kCompressedMarlin24Roles},
    {Packing::kCompressedNvfp4, "compressed-tensors NVFP4", kCompressedMethods, kCompressedNvfp4Roles, Rest::kNone, 2},
    {Packing::kCompressedMxfp4, "compressed-tensors MXFP4", kCompressedMethods, kCompressedMxfp4Roles, Rest::kNone, 2},
    {Packing::kCompressedMxfp6, "compressed-tensors MXFP6", kCompressedMethods, kCompressedMxfp4Roles},  // refine()
    {Packing::kCompressedMxfp8, "compressed-tensors MXFP8", kCompressedMethods, kCompressedMxfp8Roles, Rest::kNone, 1},
    {Packing::kCompressedPacked, "compressed-tensors packed integers", kCompressedMethods, kCompressedPackedRoles},
    {Packing::kCompressedSparse, "compressed-tensors sparse", kCompressedMethods, kCompressedSparseRoles},
    {Packing::kModeloptNvfp4, "ModelOpt NVFP4", kModeloptMethods, kModeloptNvfp4Roles, Rest::kNone, 2},
    {Packing::kMxfp4, "MXFP4", kMxfp4Methods, kMxfp4Roles, Rest::kNone, 2},
    {Packing::kHqq, "HQQ", kHqqMethods, kHqqRoles, Rest::kModule},
    {Packing::kQuanto, "Quanto", kQuantoMethods, kQuantoRoles},
    {Packing::kTorchao, "torchao", kTorchaoMethods, kTorchaoRoles, Rest::kFlattened},
    {Packing::kAqlm, "AQLM", kAqlmMethods, kAqlmRoles},
    {Packing::kVptq, "VPTQ", kVptqMethods, kVptqRoles, Rest::kModule},
    {Packing::kSpqr, "SpQR", kSpqrMethods, kSpqrRoles, Rest::kModule},
    {Packing::kHiggs, "HIGGS", kHiggsMethods, kHiggsRoles},
    {Packing::kEetq, "EETQ", kEetqMethods, kEetqRoles, Rest::kNone, 1},
    {Packing::kExl2, "EXL2", kExl2Methods, kExl2Roles},
    {Packing::kExl3, "EXL3", kExl3Methods, kExl3Roles},
    {Packing::kAffine, "integers with scales and biases", kAffineMethods, kAffineRoles},
    {Packing::kBitnet, "BitNet", kBitnetMethods, kBitnetRoles},  // set by refine()
    {Packing::kInteger, "integers with scales", kIntegerMethods, kIntegerRoles, Rest::kNone, 1},
    {Packing::kFloat8, "float8 with scales", kFloat8Methods, kFloat8Roles, Rest::kNone, 1},
    {Packing::kGgml, "quantized blocks of GGUF", {}, kGgmlRoles},
};

constexpr std::string_view kBitsandbytes4Shapes[] = {"size(quant_map) = 16", "size(nested_quant_map) = 256"};
constexpr std::string_view kBitsandbytes8Shapes[] = {"size(SCB) = weight[0]"};
// Elements per word: qzeros[1] words hold scales[1] columns, qweight[0] words hold g_idx[0] rows.
constexpr std::string_view kGptqShapes[] = {"qzeros[0] = scales[0]", "qweight[1]*g_idx[0] = scales[1]*g_idx[0]",
                                            "qzeros[1]*g_idx[0] = qweight[0]*scales[1]"};
constexpr std::string_view kAwqGemm[] = {"qweight[1]*8 = scales[1]", "qzeros[1] = qweight[1]", "qzeros[0] = scales[0]"};
constexpr std::string_view kAwqGemv[] = {"qweight[0] = scales[0]", "qzeros[0] = scales[0]"};
constexpr std::string_view kAwqFast[] = {"qweight[0]*4 = scales[1]", "qzeros[1] = scales[1]", "qzeros[0] = scales[0]"};
constexpr std::string_view kPackedByRows[] = {"packed[0] = scale[0]", "size(shape) = rank(packed)"};
constexpr std::string_view kPackedWhole[] = {"size(scale) = 1"};
constexpr std::string_view kNvfp4Shapes[] = {"packed[0] = scale[0]", "packed[-1] = scale[-1]*8"};
constexpr std::string_view kCompressedMxfp4Shapes[] = {"packed[0] = scale[0]", "packed[-1] = scale[-1]*16"};
constexpr std::string_view kCompressedMxfp6Shapes[] = {"packed[0] = scale[0]", "packed[-1] = scale[-1]*24"};
constexpr std::string_view kCompressedMxfp8Shapes[] = {"weight[0] = scale[0]", "weight[-1] = scale[-1]*32"};
constexpr std::string_view kModeloptShapes[] = {"weight[0] = scale[0]", "weight[-1] = scale[-1]*8"};
constexpr std::string_view kMxfp4Shapes[] = {"blocks[0] = scales[0]", "blocks[1] = scales[1]", "blocks[2] = scales[2]",
                                             "blocks[3] = 16"};
constexpr std::string_view kAqlmShapes[] = {"codes[2] = codebooks[0]", "codes[0]*codebooks[2] = scales[0]"};
constexpr std::string_view kEetqShapes[] = {"size(scales) = weight[1]"};
constexpr std::string_view kAffineShapes[] = {"weight[0] = scales[0]", "scales[-1] = biases[-1]"};

constexpr ShapeEquations kBitsandbytes4Either[] = {kBitsandbytes4Shapes},
                         kBitsandbytes8Either[] = {kBitsandbytes8Shapes}, kGptqEither[] = {kGptqShapes},
                         kAwqEither[] = {kAwqGemm, kAwqGemv, kAwqFast}, kPackedEither[] = {kPackedByRows, kPackedWhole},
                         kNvfp4Either[] = {kNvfp4Shapes}, kCompressedMxfp4Either[] = {kCompressedMxfp4Shapes},
                         kCompressedMxfp6Either[] = {kCompressedMxfp6Shapes},
                         kCompressedMxfp8Either[] = {kCompressedMxfp8Shapes}, kModeloptEither[] = {kModeloptShapes},
                         kMxfp4Either[] = {kMxfp4Shapes}, kAqlmEither[] = {kAqlmShapes}, kEetqEither[] = {kEetqShapes},
                         kAffineEither[] = {kAffineShapes};

bool is_integer(DType dtype) { return dtype >= DType::kUint8 && dtype <= DType::kInt64; }

}  // namespace

bool fits(PackedDType class_of, DType dtype) {
  switch (class_of) {
    case kAny:
      return true;
    case kFloat:
      return is_floating(dtype);
    case PackedDType::kInteger:
      return is_integer(dtype);
    case kByte:
      return dtype == DType::kInt8 || dtype == DType::kUint8;
    case kInt8:
      return dtype == DType::kInt8;
    case kUint8:
      return dtype == DType::kUint8;
    case kInt32:
      return dtype == DType::kInt32;
    case kUint32:
      return dtype == DType::kUint32;
    case PackedDType::kFloat8:
      return dtype >= DType::kFloat8E4M3 && dtype <= DType::kFloat8E5M2Fnuz;
    case kExponent:
      return dtype == DType::kUint8 || dtype == DType::kFloat8E8M0;
  }
  return false;
}

std::span<const PackedLayout> packed_layouts() { return kLayouts; }

std::span<const ShapeEquations> shape_equations(Packing packing) {
  switch (packing) {
    case Packing::kBitsandbytes4:
      return kBitsandbytes4Either;
    case Packing::kBitsandbytes8:
      return kBitsandbytes8Either;
    case Packing::kGptq:
      return kGptqEither;
    case Packing::kAwq:
      return kAwqEither;
    case Packing::kCompressedPacked:
      return kPackedEither;
    case Packing::kCompressedNvfp4:
      return kNvfp4Either;
    case Packing::kCompressedMxfp4:
      return kCompressedMxfp4Either;
    case Packing::kCompressedMxfp6:
      return kCompressedMxfp6Either;
    case Packing::kCompressedMxfp8:
      return kCompressedMxfp8Either;
    case Packing::kModeloptNvfp4:
      return kModeloptEither;
    case Packing::kMxfp4:
      return kMxfp4Either;
    case Packing::kAqlm:
      return kAqlmEither;
    case Packing::kEetq:
      return kEetqEither;
    case Packing::kAffine:
      return kAffineEither;
    default:
      return {};
  }
}

}  // namespace reshard

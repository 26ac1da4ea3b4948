// SPDX-License-Identifier: Apache-2.0
// The ways to change how weights are quantized, each in a source of its own; requantization.cc chooses among them.
#pragma once

#include "lib/convert/weights/computed_weights.h"

namespace reshard {

// Dequantization of float8 matrices that have a scale for each block (DeepSeek's FP8: x.weight next to
// x.weight_scale_inv), for each row (compressed-tensors, FBGEMM: x.weight_scale), or for the whole matrix (Ministral 3,
// with x.activation_scale). As in transformers (integrations/finegrained_fp8.py), an element is multiplied by its scale
// in float32 and rounded once; compressed-tensors rounds to the scales' dtype first.
//
// If config.json describes the quantization (`float8`): sets the dtype of the matrices that `typing` changes, and
// removes their scales and those of their activations from the output (SourceView::applied). Fails, naming the tensor,
// for a matrix without scales, scales whose shape does not fit, and a matrix that would stay float8 while others do
// not.
Result<Requantization> apply_block_scales(SourceView& view, const std::optional<Float8Scales>& float8,
                                          const DtypeOptions& typing, ConversionNotes& notes);

// Quantization to float8 (e4m3fn): x.weight next to x.weight_scale_inv, as transformers does it
// (integrations/finegrained_fp8.py, Fp8Quantize), with a scale for each block of 128 x 128, as DeepSeek publishes them,
// or for each matrix. In float32, the scale is 448 times the reciprocal of the largest magnitude, an element times the
// scale is rounded once, and the reciprocal of the scale is stored.
//
// Quantizes the matrices that the family marks `quantized` or, with one scale for each matrix, the matrices of layers
// that tensor parallelism shards; not those that `typing` keeps. A block at the edge of a matrix is smaller. Returns no
// tensors if there are no such matrices. Fails (unsupported) if one is not floating-point.
Result<Requantization> quantize_fp8(SourceView& view, const Model& model, const DtypeOptions& typing,
                                    ConversionNotes& notes);

// Conversion of experts' matrices between MXFP4 and floating point. gpt-oss stores x_blocks (uint8, two 4-bit floats
// each) and x_scales (exponents); the matrix has the input and output dimensions swapped and the elements
// value * 2^(scale - 127), as in transformers (integrations/mxfp4.py, convert_moe_packed_tensors).

// Replaces blocks and scales by matrices, in a view whose model is known, if `typing` asks for another dtype. Fails,
// naming the tensor, for blocks without scales, scales without blocks, and shapes that do not fit each other.
Result<Requantization> unpack_mxfp4(SourceView& view, const Model& model, const DtypeOptions& typing,
                                    ConversionNotes& notes);

// Replaces the matrices that the family stores in MXFP4, all of them, by blocks and scales. The scale of 32 values is
// the smallest power of two that brings their largest magnitude to at most 6; an element becomes the nearest 4-bit
// value and, of two equally near, the larger, as in triton_kernels (numerics_details/mxfp.py, downcast_to_mxfp).
// Unpacked values become the same 4-bit values again. Returns no tensors if there are no such matrices. Fails
// (unsupported) if one is not floating-point or its input is not a multiple of 32.
Result<Requantization> pack_mxfp4(SourceView& view, const Model& model, const DtypeOptions& typing,
                                  ConversionNotes& notes);

}  // namespace reshard

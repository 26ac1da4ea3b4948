// Compares weights whose quantization changes with numbers computed by hand.
#include "lib/convert/weights/requantization.h"

#include <gmock/gmock.h>

#include "tests/support/conversion_steps.h"
#include "tests/support/made_checkpoint.h"
#include "tests/support/temp_dir.h"

namespace reshard::requantization_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Values = std::vector<float>;

constexpr const char* kGptOss =
    R"({"model_type": "gpt_oss", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 1})";

// A checkpoint and its conversion.
class Requantizing : public testing::Test {
 protected:
  std::string error(const DtypeOptions& typing, const Format& format = kModels, const Selection& selection = {}) {
    return error_of(run(typing, format, selection));
  }
  Result<Requantization> run(const DtypeOptions& typing, const Format& format = kModels,
                             const Selection& selection = {}) {
    source_.write();
    view_ = {source_.catalog(), {}};
    const PackedWeights packed = find_packed(source_.catalog(), nullptr);
    for (const PackedWeight& weight : packed.weights)
      for (const PackedTensor& part : weight.parts)
        view_.packed[view_.catalog.tensors()[part.tensor].name] = {weight.name, weight.packing,
                                                                   part.role == "weight" || part.role == "values"};
    notes_ = {};
    return requantize(view_, names_, selection, typing, format, notes_);
  }
  // After run(), the values read from the view.
  struct Read {
    Read(const Requantization& made, const SourceView& view, FilePool& files)
        : stored(*made.stored, files), computed(view.catalog, stored) {
      set_requantized(made, stored, computed);
    }
    FileSource stored;
    ComputedSource computed;
  };
  const Tensor& tensor(const std::string& name) const {
    return view_.catalog.tensors()[view_.catalog.find(name).value()];
  }
  bool is_applied(const std::string& name) const { return view_.applied.contains(view_.catalog.find(name).value()); }

  TempDir dir_;
  MadeCheckpoint source_{dir_.path(), "data"};
  Translation names_;
  SourceView view_;
  ConversionNotes notes_;
};

TEST_F(Requantizing, NothingIsMadeOfWhatIsNotQuantized) {
  source_.add("x.weight", {2, 2}, {1, 2, 3, 4});
  EXPECT_EQ(must(run({})).stored, nullptr);
  EXPECT_EQ(must(run({.dtype = DType::kBFloat16, .keep_dtype = {}})).stored, nullptr);
  EXPECT_TRUE(view_.computed.empty());
}

// ---- float8 matrices times their scales

// A matrix [3, 3] in blocks of 2 x 2, with the elements 1, 2, -1 and the scales 2, 3 | 5, 7.
class ScalesOfBlocks : public Requantizing {
 protected:
  ScalesOfBlocks() { names_.float8 = Float8Scales{"_scale_inv", 2, 2}; }
  void add_matrix() { source_.add("x.weight", DType::kFloat8E4M3, {3, 3}, "\x38\x40\xb8\x38\x40\xb8\x38\x40\xb8"); }
  const DtypeOptions floats_{.dtype = DType::kFloat32, .keep_dtype = {}};
};

TEST_F(ScalesOfBlocks, MultiplyTheirMatrix) {
  add_matrix();
  source_.add("x.weight_scale_inv", {2, 2}, {2, 3, 5, 7});
  source_.add("x.input_scale", {}, {9});
  const Requantization made = must(run(floats_));
  EXPECT_EQ(tensor("x.weight").dtype, DType::kFloat32);
  EXPECT_EQ(view_.computed, (std::unordered_set<std::size_t>{0}));
  EXPECT_TRUE(is_applied("x.weight_scale_inv"));
  EXPECT_TRUE(is_applied("x.input_scale")) << "of what float8 matrices are multiplied with";
  EXPECT_EQ(made.stored->tensors()[0].dtype, DType::kFloat8E4M3);
  ASSERT_EQ(notes_.left_out.size(), 1U);
  EXPECT_EQ(notes_.left_out[0].tensors, 2);
  EXPECT_EQ(notes_.left_out[0].bytes, 20);
  Read read(made, view_, source_.files());
  EXPECT_EQ(floats_of(read.computed, "x.weight"), (Values{2, 4, -3, 2, 4, -3, 5, 10, -7}));
}

TEST_F(ScalesOfBlocks, HaveToBeThere) {
  add_matrix();
  EXPECT_THAT(error(floats_), HasSubstr("'x.weight' is float8, and its scales are missing"));
  source_.add("x.weight_scale_inv", {2, 3}, counted(6));
  EXPECT_THAT(error(floats_), HasSubstr("[2, 3] of float32: expected [2, 2], one for each 2 x 2 of [3, 3]"));
  EXPECT_EQ(error({}), "") << "which writes them as they are";
}

TEST_F(ScalesOfBlocks, AreAppliedToAllMatricesOrToNone) {
  add_matrix();
  source_.add("x.weight_scale_inv", {2, 2}, {2, 3, 5, 7});
  source_.add("y.weight", DType::kFloat8E4M3, {1, 1}, "8");
  source_.add("y.weight_scale_inv", {1, 1}, {2});
  EXPECT_THAT(error({.dtype = DType::kFloat32, .keep_dtype = {"y.*"}}),
              HasSubstr("--keep-dtype: tensor 'y.weight' would stay float8"));
  EXPECT_EQ(must(run({.dtype = DType::kFloat32, .keep_dtype = {"*"}})).stored, nullptr);
}

TEST_F(ScalesOfBlocks, AreRefusedWhereNoConfigSaysWhatTheyAre) {
  names_.float8.reset();
  add_matrix();
  source_.add("x.qscale", {}, {2});
  EXPECT_THAT(error(floats_), AllOf(HasSubstr("'x.weight' is float8_e4m3fn next to tensor 'x.qscale'"),
                                    HasSubstr("it is unknown how the scales are applied")));
  EXPECT_EQ(error({.dtype = DType::kFloat32, .keep_dtype = {"x.weight"}}), "");
}

// ---- --quantize

class Quantizing : public Requantizing {
 protected:
  Quantizing() { source_.add(kMatrix, {2, 4}, {7, 3.5, -1.75, 0.875, 0, 7, -7, 1.75}); }
  void translate_to(const Format& format, const std::string& config = kTinyLlama, const Naming& naming = {}) {
    names_ = translated(source_.catalog(), format, naming, config);
  }
  const std::string kMatrix = "model.layers.0.self_attn.q_proj.weight", kNorm = "model.norm.weight";
  const DtypeOptions fp8_{.dtype = {}, .keep_dtype = {}, .quantize = Quantization::kFp8Tensor};
  const DtypeOptions mxfp4_{.dtype = {}, .keep_dtype = {}, .quantize = Quantization::kMxfp4};
};

TEST_F(Quantizing, OneScaleBringsTheLargestMagnitudeTo448) {
  source_.add(kNorm, {2}, {1, 2});
  source_.add("model.embed_tokens.weight", {10, 4}, counted(40));
  translate_to(kModels);
  const Requantization made = must(run(fp8_));
  EXPECT_THAT(names_of(view_.catalog),
              ElementsAre("model.embed_tokens.weight", kMatrix, kMatrix + "_scale_inv", kNorm));
  EXPECT_EQ(tensor(kMatrix).dtype, DType::kFloat8E4M3);
  EXPECT_EQ(tensor(kMatrix + "_scale_inv").shape, Dims{});
  EXPECT_EQ(tensor(kNorm).dtype, DType::kFloat32);
  EXPECT_EQ(must(made.config.get_string("quant_method")), "fp8");
  EXPECT_EQ(to_text(*made.config.find("modules_to_not_convert"), 0), R"(["model.embed_tokens"])");
  EXPECT_THAT(notes_.warnings, ElementsAre(HasSubstr("1 tensor become float8")));
  Read read(made, view_, source_.files());
  EXPECT_EQ(floats_of(read.computed, kMatrix), (Values{448, 224, -112, 56, 0, 448, -448, 112}));
  EXPECT_FLOAT_EQ(floats_of(read.computed, kMatrix + "_scale_inv").at(0), 7.0F / 448);
}

TEST_F(Quantizing, WhatIsKeptStaysAsItIs) {
  const std::string other = "model.layers.0.self_attn.k_proj.weight";
  source_.add(other, {4, 4}, counted(16));
  translate_to(kModels);
  DtypeOptions typing = fp8_;
  typing.keep_dtype = {"*q_proj*"};
  ASSERT_NE(must(run(typing)).stored, nullptr);
  EXPECT_EQ(tensor(kMatrix).dtype, DType::kFloat32);
  EXPECT_EQ(tensor(other).dtype, DType::kFloat8E4M3);
  typing.keep_dtype = {"*"};
  EXPECT_THAT(error(typing), HasSubstr("no selected matrix can be quantized"));
}

TEST_F(Quantizing, NeedsNamesForScales) {
  translate_to(kAll);
  EXPECT_THAT(error(fp8_, kAll), HasSubstr("--quantize fp8-tensor: only Hugging Face names have names for scales"));
  translate_to(kModels, kTinyLlama, {.convention = Convention::kTorchtitan, .keep_names = false});
  EXPECT_THAT(error(fp8_), HasSubstr("only Hugging Face names"));
}

TEST_F(Quantizing, NeedsAModelThatMayBeQuantized) {
  names_ = must(translate(source_.catalog(), {}, {}, {}, kModels));
  EXPECT_THAT(error(fp8_), HasSubstr("a config.json must record the quantization"));
  translate_to(kModels);
  EXPECT_THAT(error(mxfp4_), HasSubstr("models of family llama have no matrices in MXFP4; --quantize fp8-tensor"));
  DtypeOptions blocks = fp8_;
  blocks.quantize = Quantization::kFp8Block;
  EXPECT_THAT(error(blocks),
              HasSubstr("have no matrices in float8 blocks; --quantize fp8-tensor applies to this family"));
  DtypeOptions both = fp8_;
  both.dtype = DType::kFloat8E5M2;
  EXPECT_THAT(error(both), HasSubstr("cannot be a float8 type"));
  Selection merges;
  merges.merge_adapter = true;
  EXPECT_THAT(error(fp8_, kModels, merges), HasSubstr("merge the adapter first"));
}

TEST_F(Quantizing, NeedsFloats) {
  source_.add("model.layers.0.self_attn.k_proj.weight", DType::kFloat8E4M3, {1, 2}, "88");
  translate_to(kModels);
  EXPECT_THAT(error(fp8_), HasSubstr("is float8_e4m3fn: --quantize supports only floating-point matrices"));
}

// ---- MXFP4

class Mxfp4 : public Requantizing {
 protected:
  const std::string kDown = "model.layers.0.mlp.experts.down_proj";
  const DtypeOptions floats_{.dtype = DType::kFloat32, .keep_dtype = {}};
  void translate_model() { names_ = translated(source_.catalog(), kModels, {}, kGptOss); }
};

TEST_F(Mxfp4, BlocksAndScalesBecomeTheirMatrixAndBack) {
  // One expert with two columns: 0.5, 1, 0.5, 1, ... times 2^1, and -6, 4, ... times 2^-1.
  source_.add(kDown + "_blocks", DType::kUint8, {1, 2, 1, 16}, std::string(16, '\x21') + std::string(16, '\x6f'));
  source_.add(kDown + "_scales", DType::kUint8, {1, 2, 1}, "\x80\x7e");
  translate_model();
  Requantization made = must(run(floats_));
  EXPECT_EQ(tensor(kDown).shape, (Dims{1, 32, 2}));
  EXPECT_EQ(tensor(kDown).dtype, DType::kFloat32);
  EXPECT_TRUE(is_applied(kDown + "_blocks"));
  EXPECT_TRUE(is_applied(kDown + "_scales"));
  EXPECT_EQ(notes_.left_out.size(), 1U);
  Values expected;
  for (int row = 0; row < 32; ++row) {
    expected.push_back(row % 2 == 0 ? 1 : 2);
    expected.push_back(row % 2 == 0 ? -3 : 2);
  }
  Read read(made, view_, source_.files());
  EXPECT_EQ(floats_of(read.computed, kDown), expected);

  MadeCheckpoint unpacked(dir_.path(), "unpacked");
  unpacked.add(kDown, {1, 32, 2}, expected);
  unpacked.write();
  view_ = {unpacked.catalog(), {}};
  const DtypeOptions typing{.dtype = {}, .keep_dtype = {}, .quantize = Quantization::kMxfp4};
  made = must(requantize(view_, names_, {}, typing, kModels, notes_));
  EXPECT_TRUE(is_applied(kDown));
  EXPECT_EQ(must(made.config.get_string("quant_method")), "mxfp4");
  Read again(made, view_, unpacked.files());
  // The smallest powers of two that bring 2 and 3 to at most 6 are both 2^-1. With them 1 becomes 2 (code 4), 2 becomes
  // 4 (6), -3 becomes -6 (f).
  EXPECT_EQ(bytes_of(again.computed, kDown + "_blocks"), std::string(16, '\x64') + std::string(16, '\x6f'));
  EXPECT_EQ(bytes_of(again.computed, kDown + "_scales"), "\x7e\x7e");
}

TEST_F(Mxfp4, BlocksAndScalesBelongTogether) {
  source_.add(kDown + "_blocks", DType::kUint8, {1, 2, 1, 16}, std::string(32, '\0'));
  translate_model();
  EXPECT_THAT(error(floats_), HasSubstr("is in MXFP4, and its scales are missing"));
  source_.add(kDown + "_scales", DType::kUint8, {1, 1, 1}, "\x7f");
  EXPECT_THAT(error(floats_), HasSubstr("[1, 1, 1] of uint8: expected [1, 2, 1] of uint8"));
}

TEST_F(Mxfp4, BlocksAndScalesStayTogether) {
  source_.add(kDown + "_blocks", DType::kUint8, {1, 1, 1, 16}, std::string(16, '\0'));
  source_.add(kDown + "_scales", DType::kUint8, {1, 1, 1}, "\x7f");
  translate_model();
  EXPECT_THAT(error({.dtype = DType::kFloat32, .keep_dtype = {"*_scales"}}), HasSubstr("would stay in MXFP4"));
  EXPECT_EQ(must(run({.dtype = DType::kFloat32, .keep_dtype = {"*down_proj*"}})).stored, nullptr);
}

TEST_F(Mxfp4, ScalesScaleBlocks) {
  source_.add(kDown + "_scales", DType::kUint8, {1, 1, 1}, "\x7f");
  translate_model();
  EXPECT_THAT(error(floats_), HasSubstr("contains scales of values that are missing"));
}

TEST_F(Mxfp4, InputsAreAMultipleOf32) {
  source_.add(kDown, {1, 16, 2}, counted(32));
  translate_model();
  EXPECT_THAT(error({.dtype = {}, .keep_dtype = {}, .quantize = Quantization::kMxfp4}),
              HasSubstr("expected a multiple of 32 inputs"));
}

}  // namespace
}  // namespace reshard::requantization_test

// Checks the shapes of a model's tensors against each other, without a config.
#include "lib/model/shapes.h"

#include <gmock/gmock.h>

namespace reshard::shapes_test {
namespace {

using testing::HasSubstr;

Tensor tensor(const std::string& name, const Dims& shape, DType dtype = DType::kFloat32) {
  Tensor out;
  out.name = name;
  out.shape = shape;
  out.dtype = dtype;
  return out;
}

Status agree(const std::string& family, const std::vector<Tensor>& tensors) {
  std::vector<const Tensor*> pointers;
  for (const Tensor& t : tensors) pointers.push_back(&t);
  return check_shapes_agree(*find_family(family), pointers);
}

std::string fault(const std::string& family, const std::vector<Tensor>& tensors) {
  const Status status = agree(family, tensors);
  return status ? "" : status.error().message();
}

TEST(Shapes, ASizeIsTheSameInAllThatHaveIt) {
  const Tensor embedding = tensor("model.embed_tokens.weight", {160, 64}), norm = tensor("model.norm.weight", {64});
  EXPECT_TRUE(agree("llama", {embedding, norm, tensor("lm_head.weight", {160, 64})}));
  // The head is one rank's part of a vocabulary that eight ranks share.
  EXPECT_EQ(fault("llama", {embedding, norm, tensor("lm_head.weight", {1280, 64})}),
            "tensor 'lm_head.weight' [1280, 64]: expected vocab_size 160 in dimension 0, by tensor "
            "'model.embed_tokens.weight' [160, 64], got 1,280");
}

TEST(Shapes, FormulasHoldWhereTheirSizesAreKnown) {
  const Tensor norm = tensor("h.0.ln_1.weight", {64}), fused = tensor("h.0.attn.c_attn.bias", {192});
  EXPECT_TRUE(agree("gpt2", {norm, fused}));
  EXPECT_TRUE(agree("gpt2", {fused, tensor("h.0.mlp.c_fc.bias", {7})}));  // nothing determines hidden_size
  EXPECT_THAT(fault("gpt2", {fused, norm, tensor("h.1.attn.c_attn.bias", {64})}),
              HasSubstr("'h.1.attn.c_attn.bias' [64]: expected 192 (3 x hidden_size 64) in dimension 0, by tensor "
                        "'h.0.ln_1.weight' [64], got 64"));
}

TEST(Shapes, StoredFormsAreLookedAtWhereTheyKeepDimensions) {
  const Tensor norm = tensor("transformer.ln_f.weight", {64});
  const Tensor matrix = tensor("transformer.h.0.mlp.c_fc.weight", {256, 64});
  EXPECT_TRUE(agree("nanogpt", {norm, matrix}));
  EXPECT_THAT(fault("gpt2", {norm, matrix}), HasSubstr("expected hidden_size 64 in dimension 0"));
  // Concatenated q, k and v determine no single size.
  EXPECT_TRUE(agree("llama", {tensor("model.norm.weight", {64}),
                              tensor("model.decoder.0.pp_block.attn.qkv_proj.weight", {100, 64})}));
}

TEST(Shapes, WhatIsNoParameterSaysNothing) {
  const Tensor norm = tensor("model.norm.weight", {64});
  EXPECT_TRUE(
      agree("llama", {norm, tensor("optimizer.state.model.norm.weight.exp_avg", {32}),
                      tensor("model.layers.0.input_layernorm.weight", {9}, DType::kUint8),  // values of a packed weight
                      tensor("score.weight", {3, 9}), tensor("model.layers.1.input_layernorm.weight", Dims())}));
}

}  // namespace
}  // namespace reshard::shapes_test

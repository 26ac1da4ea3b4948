#include "lib/model/parameter_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace reshard::parameter_order_test {
namespace {

using Names = std::vector<std::string>;

TEST(ParameterOrder, IsThatOfTheModulesWhateverTheOrderOfNames) {
  Names wanted = {"model.embed_tokens.weight"};
  for (int layer = 0; layer < 12; ++layer)
    for (const std::string name : {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
                                   "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
                                   "mlp.down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight"})
      wanted.push_back("model.layers." + std::to_string(layer) + "." + name);
  wanted.insert(wanted.end(), {"model.norm.weight", "lm_head.weight"});
  Names shuffled = wanted;
  std::sort(shuffled.begin(), shuffled.end());
  EXPECT_EQ(in_parameter_order("llama", shuffled), wanted);
  std::reverse(shuffled.begin(), shuffled.end());
  EXPECT_EQ(in_parameter_order("llama", shuffled), wanted);
  shuffled.emplace_back("model.layers.0.self_attn.rotary_emb.inv_freq");  // not a parameter of this type
  EXPECT_EQ(in_parameter_order("llama", shuffled), std::nullopt);
  EXPECT_EQ(in_parameter_order("unheard_of", wanted), std::nullopt);
  EXPECT_EQ(in_parameter_order("llama", {}), Names());
}

// Biases follow their matrices and precede the next module.
TEST(ParameterOrder, HasWhatOnlySomeModelsOfATypeHave) {
  EXPECT_EQ(
      in_parameter_order("qwen2", {"model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.bias",
                                   "model.layers.0.self_attn.q_proj.weight"}),
      (Names{"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias",
             "model.layers.0.self_attn.k_proj.weight"}));
}

}  // namespace
}  // namespace reshard::parameter_order_test

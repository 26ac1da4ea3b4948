// What a Hugging Face config.json says of a model's shape.
#pragma once

#include <string>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard {

struct ModelConfig {
  std::string path;          // where it was read
  std::string model_type;    // "llama"
  std::string architecture;  // "LlamaForCausalLM"; may be empty
  Index vocab_size = 0;
  Index hidden_size = 0;
  Index intermediate_size = 0;
  Index num_hidden_layers = 0;
  Index num_attention_heads = 0;
  Index num_key_value_heads = 0;  // num_attention_heads where the file does not say
  Index head_dim = 0;             // hidden_size / num_attention_heads where the file does not say
  bool tie_word_embeddings = false;
};

// Fails where a number is missing, not positive, or makes no sense beside the others.
Result<ModelConfig> read_config(const std::string& path);

// The config.json to use for a checkpoint: `given` if not empty, else the one in the checkpoint's directory or its
// parent. Empty when there is none.
std::string find_config(const std::string& checkpoint, const std::string& given);

}  // namespace reshard

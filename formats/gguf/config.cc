// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "formats/gguf/gguf.h"
#include "lib/base/text.h"

namespace reshard::gguf {
namespace {

// An architecture whose pairs suffice to make a config.json, and whose tensors llama.cpp's converter only renames and
// reorders (conversion/llama.py, conversion/qwen.py).
struct Architecture {
  std::string_view name;  // general.architecture
  std::string_view model_type;
  std::string_view class_name;
};
constexpr Architecture kArchitectures[] = {{"llama", "llama", "LlamaForCausalLM"},
                                           {"qwen2", "qwen2", "Qwen2ForCausalLM"},
                                           {"qwen3", "qwen3", "Qwen3ForCausalLM"}};

// A number of the header and its name in config.json.
struct Member {
  std::string_view key;  // after the architecture's name
  std::string_view name;
};
constexpr Member kNeeded[] = {{".block_count", "num_hidden_layers"},
                              {".embedding_length", "hidden_size"},
                              {".feed_forward_length", "intermediate_size"},
                              {".attention.head_count", "num_attention_heads"}};

const Json* text_of(const Header& header, std::string_view key) {
  const Json* const value = header.find(key);
  return value && value->is_string() ? value : nullptr;
}

// Collects the members of a config.json.
class Maker {
 public:
  Maker(const Header& header, const Catalog& tensors, const Architecture& architecture)
      : header_(header), tensors_(tensors), architecture_(architecture) {}

  MadeConfig make() {
    if (const std::string why = obstacle(); !why.empty()) return {{}, why};
    Json config = Json::object();
    config.set("architectures", Json::array().push_back(architecture_.class_name));
    for (const Member& m : kNeeded) {
      const Json* const value = find(m.key);
      if (!value || !value->as_index())
        return {{},
                std::string(architecture_.name) + std::string(m.key) + " is no number" +
                    (value && value->is_integer() ? " below 2^63" : "")};
      config.set(m.name, *value);
    }
    set_attention(config);
    set_rest(config);
    return {std::move(config), {}};
  }

 private:
  const Json* find(std::string_view key) const {
    return header_.find(std::string(architecture_.name) + std::string(key));
  }
  const Tensor* tensor(std::string_view name) const {
    const auto found = tensors_.find(name);
    return found ? &tensors_.tensors()[*found] : nullptr;
  }
  bool has(std::string_view name) const {
    for (const Tensor& t : tensors_.tensors())
      if (t.name == name || t.name.starts_with(std::string(name) + ":")) return true;
    return false;
  }

  // Returns why no config.json can be made: a setting that the header's pairs describe incompletely. Empty if one can.
  std::string obstacle() const {
    if (const Json* experts = find(".expert_count"); experts && experts->is_integer()) {
      const auto count = experts->as_index();  // nothing for 2^63 or more
      if (!count || *count > 0) return "it has experts";
    }
    const Json* const scaling = find(".rope.scaling.type");
    const bool is_scaled = scaling && scaling->is_string() && *scaling->as_string() != "none";
    // Llama 3.1's scaling is stored as its result only, a factor for each frequency.
    if (is_scaled || tensor("rope_freqs.weight")) return "the scaling of its rotary embedding is not all in the file";
    return {};
  }

  void copy(Json& config, std::string_view key, std::string_view name, Json otherwise = {}) const {
    const Json* const value = find(key);
    if (value && value->is_number())
      config.set(name, *value);
    else if (!otherwise.is_null())
      config.set(name, std::move(otherwise));
  }

  void set_attention(Json& config) const {
    const Index heads = *config.find("num_attention_heads")->as_index(),
                width = *config.find("hidden_size")->as_index();
    copy(config, ".attention.head_count_kv", "num_key_value_heads", heads);
    copy(config, ".attention.key_length", "head_dim", heads > 0 ? Json(width / heads) : Json());
    if (architecture_.model_type == "llama") {
      config.set("attention_bias", has("blk.0.attn_q.bias")).set("mlp_bias", has("blk.0.ffn_up.bias"));
    }
  }

  // Returns the dtype of the layers' matrices. Norms are always stored as float32.
  std::string dtype() const {
    for (const std::string_view name : {"blk.0.attn_q.weight", "blk.0.ffn_down.weight", "token_embd.weight"})
      if (const Tensor* t = tensor(name); t && is_floating(t->dtype)) return std::string(info(t->dtype).torch_name);
    return {};
  }

  void set_rest(Json& config) const {
    config.set("hidden_act", "silu").set("model_type", architecture_.model_type);
    copy(config, ".context_length", "max_position_embeddings");
    copy(config, ".attention.layer_norm_rms_epsilon", "rms_norm_eps", 1e-5);
    copy(config, ".rope.freq_base", "rope_theta", 10'000.0);
    for (const std::string_view token : {"bos", "eos"})
      if (const Json* id = header_.find("tokenizer.ggml." + std::string(token) + "_token_id"); id && id->is_integer())
        config.set(std::string(token) + "_token_id", *id);
    config.set("tie_word_embeddings", !has("output.weight"));
    if (const std::string name = dtype(); !name.empty()) config.set("torch_dtype", name);
    const Tensor* const embedding = tensor("token_embd.weight");
    const Index words =
        embedding && embedding->shape.rank() == 2 ? embedding->shape[0] : header_.length_of("tokenizer.ggml.tokens");
    if (words > 0)
      config.set("vocab_size", words);
    else
      copy(config, ".vocab_size", "vocab_size");
  }

  const Header& header_;
  const Catalog& tensors_;
  const Architecture& architecture_;
};

}  // namespace

MadeConfig make_config(const Header& header, const Catalog& tensors) {
  const Json* const name = text_of(header, "general.architecture");
  if (!name) return {{}, "general.architecture is missing"};
  for (const Architecture& architecture : kArchitectures)
    if (architecture.name == *name->as_string()) return Maker(header, tensors, architecture).make();
  return {{}, "the architecture " + printable(*name->as_string()) + " is in no table"};
}

}  // namespace reshard::gguf

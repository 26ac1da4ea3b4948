// SPDX-License-Identifier: Apache-2.0
// What a Hugging Face config.json says about a model's shape.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/json.h"
#include "lib/layout/box.h"
#include "lib/model/families.h"
#include "lib/model/formula.h"

namespace reshard {

class Catalog;
class Reader;

// How a model's float8 matrices are scaled: next to each matrix is a tensor with one factor for each of its blocks.
struct Float8Scales {
  std::string_view suffix;                  // of the scales' name, after the matrix's: "_scale_inv"
  Index block_rows = 0, block_columns = 0;  // 0: the whole dimension
  bool is_chosen = false;           // the producer chose which matrices are float8; otherwise the family lists them
  bool is_product_rounded = false;  // the product is rounded to the dtype of the scales first

  bool operator==(const Float8Scales&) const = default;
  // Returns the shape of the scales of a matrix of this shape.
  Dims shape(const Dims& matrix) const;
};
// Returns whether scales may have `shape` instead of `expected`: a single scale may have any number of dimensions.
bool is_shape_of_scales(const Dims& shape, const Dims& expected);

inline constexpr Index kMaxConfigBytes = Index{16} << 20;  // of a config.json; real ones have a few thousand

class ModelConfig {
 public:
  // Fails if a number that every model of a known family has is missing, not positive, or contradicts others. Fills in
  // the numbers that the family of the model_type derives or gives defaults for (families' tables). A model with
  // several parts is described by its text_config.
  static Result<ModelConfig> parse(const Json& json, std::string path, Families families = {});

  // Fails if a number is missing that every model of a known family has. Configs of other models are not checked.
  Status check() const;

  Families families;                   // the families it was read with; describing the model uses the same ones
  std::string path;                    // the file
  std::string model_type;              // "llama"
  std::string text_model_type;         // of its text_config: "qwen2"; usually empty
  std::string architecture;            // "LlamaForCausalLM"; may be empty
  std::string dtype;                   // "bfloat16", from torch_dtype or dtype; may be empty
  std::string quantization;            // "fp8", the quant_method of a quantized model; usually empty
  std::optional<Float8Scales> float8;  // if the quantization is a known one with float8 matrices
  std::string online_transform;        // compressed-tensors' group that rotates activations; usually empty

  Json file;  // the file itself; null for a part
  // The configs inside this one that have a model_type, with what the file says about each.
  std::vector<ModelConfig> parts;
  std::string part;  // path of such a part: "encoder.text_config"

  // Returns a whole number of the file or derived from it, with booleans as 0 or 1, or nothing if there is none.
  std::optional<Index> find(std::string_view name) const;
  Index number(std::string_view name) const { return find(name).value_or(0); }
  // Calls `visit(name, value)` for each of those numbers.
  template <typename Visit>
  void each_number(Visit visit) const {
    for (const auto& [name, value] : numbers_)
      if (value) visit(std::string_view(name), *value);
  }
  // Calls `visit(name, length)` for each list of the file.
  template <typename Visit>
  void each_list(Visit visit) const {
    for (const auto& [name, length] : lengths_) visit(std::string_view(name), length);
  }
  // Returns the length of a list in the file, or nothing if it is not a list.
  std::optional<Index> length(std::string_view name) const;
  NumberOf numbers() const {
    return [this](std::string_view name) { return find(name); };
  }
  void set(std::string_view name, Index value) { numbers_.insert_or_assign(std::string(name), value); }

  // Numbers that every model has.
  Index vocab_size() const { return number("vocab_size"); }
  Index hidden_size() const { return number("hidden_size"); }
  Index num_hidden_layers() const { return number("num_hidden_layers"); }
  Index num_attention_heads() const { return number("num_attention_heads"); }
  Index num_key_value_heads() const { return number("num_key_value_heads"); }
  Index head_dim() const { return number("head_dim"); }
  bool tie_word_embeddings() const { return number("tie_word_embeddings") != 0; }

  // Layers after the others that predict further tokens. They need not be stored.
  Index num_prediction_layers() const { return number("num_nextn_predict_layers"); }
  bool has_mxfp4() const { return quantization == "mxfp4"; }
  // Returns whether a quantized model leaves this parameter unquantized.
  bool is_left_unquantized(std::string_view parameter) const;

  // Returns whether the feed-forward part of a layer consists of experts: if the config has moe_layers or
  // mlp_layer_types, as listed there; otherwise every decoder_sparse_step-th layer from first_k_dense_replace on,
  // except mlp_only_layers.
  bool is_sparse_layer(Index layer) const;
  // Returns whether the attention of a layer is linear: as layer_types says, otherwise all but every
  // full_attention_interval-th.
  bool is_linear_layer(Index layer) const;
  // Returns "full_attention", "linear_attention", "sliding_attention", "moe" or "mlp", from layer_types,
  // layers_block_type or hybrid_override_pattern, or an empty string if the config does not say.
  std::string_view layer_type(Index layer) const;

 private:
  Status read(const Json& json);
  Status read_layer_types(const Json& json);
  Status read_numbered_layers(const Json& json, std::string_view member, const std::string& type);
  Status read_quantization(const Json& json);
  Status read_compressed_tensors(const Json& json);
  void read_parts(const Json& json, const std::string& prefix, int depth);
  Status make_whole();
  Status derive();
  std::string shown(std::string_view name) const;  // the number, or "nothing"

  std::map<std::string, std::optional<Index>, std::less<>> numbers_;  // nothing: null in the file
  std::map<std::string, Index, std::less<>> lengths_;                 // lengths of lists
  std::vector<std::string> unquantized_;                              // modules, "lm_head"
  std::vector<Index> mlp_only_layers_;
  std::optional<std::vector<Index>> moe_layers_;
  std::vector<std::string> mlp_layer_types_;  // "sparse", per layer; may be empty
  std::vector<std::string> layer_types_;      // "linear_attention", per layer; may be empty
};

Result<ModelConfig> read_config(const std::string& path, Families families = {});

// Returns the rope_scaling of Llama 3.1 and later: a context of 8192 stretched by `factor`.
Json llama3_rope_scaling(double factor);

// Returns the path of a file next to a checkpoint: in its directory, next to its files, or in the directory's parent.
// Empty if there is none.
Result<std::string> find_beside(const Catalog& catalog, std::string_view name);

// The config.json of an open checkpoint. An empty text means there is none.
struct ConfigFile {
  std::string path, text;
  Families families;      // used to read its model
  bool is_given = false;  // named by the user instead of found
  // Whether outputs get a copy: not of a link that leads out of the checkpoint and that the user did not name.
  bool is_copied = true;

  bool is_there() const { return !text.empty(); }
  // Returns whether it names a model_type. A config that does not, such as a trainer's own, describes no model.
  Result<bool> is_of_model() const;
  // Returns the model that it describes.
  Result<ModelConfig> model() const;
};
// Returns the file `given` if that is not empty; otherwise the one next to the checkpoint (find_beside()); otherwise
// the one that the format stores or derives (Reader::side_file()).
Result<ConfigFile> find_config_file(Reader& reader, const std::string& given = {}, Families families = {});

// Returns the model that find_config_file() describes. Nothing if there is no config, or if a config that was found
// (not given) describes no model.
Result<std::optional<ModelConfig>> config_of(Reader& reader, const std::string& given = {}, Families families = {});

}  // namespace reshard

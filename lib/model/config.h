// What a Hugging Face config.json says of a model's shape.
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

// How a model's float8 matrices are scaled: each is beside a tensor with one number for each of its blocks, with which
// the block's elements are multiplied.
struct Float8Scales {
  std::string_view suffix;                  // of that tensor's name, after the matrix's: "_scale_inv"
  Index block_rows = 0, block_columns = 0;  // 0: all that there are
  bool is_chosen = false;                   // which matrices are float8 was the producer's choice, else the family's
  bool is_product_rounded = false;          // to the dtype of the scales, before any other

  bool operator==(const Float8Scales&) const = default;
  // Of the scales of a matrix of this shape.
  Dims shape(const Dims& matrix) const;
};
// Whether scales may have this shape where they are due in that one: a single one has any number of dimensions.
bool is_shape_of_scales(const Dims& shape, const Dims& due);

inline constexpr Index kMaxConfigBytes = Index{16} << 20;  // of a config.json; real ones have a few thousand

class ModelConfig {
 public:
  // Fails where a number that every model of a known family has is missing, not positive, or makes no sense beside the
  // others. What the family of the model_type derives or leaves to its defaults (families' tables) is filled in. A
  // model with several parts is described by its text_config.
  static Result<ModelConfig> parse(const Json& json, std::string path, Families families = {});

  // That it has the numbers which every model of a known family has. Of other models nobody has checked.
  Status check() const;

  Families families;                   // that it was read with: describing it asks the same ones
  std::string path;                    // where it was read
  std::string model_type;              // "llama"
  std::string text_model_type;         // that of its text_config, where it has one: "qwen2"; mostly empty
  std::string architecture;            // "LlamaForCausalLM"; may be empty
  std::string dtype;                   // "bfloat16", of torch_dtype or dtype; may be empty
  std::string quantization;            // "fp8", the quant_method of a quantized model; mostly empty
  std::optional<Float8Scales> float8;  // where it is one that is known to make matrices float8

  // Those of its parts, which have a model_type too, and theirs: what the file itself says of each.
  std::vector<ModelConfig> parts;
  std::string part;  // where it is one: "encoder.text_config"

  // A whole number of the file, a boolean as 0 or 1, or what follows from them; nothing where there is none.
  std::optional<Index> find(std::string_view name) const;
  Index number(std::string_view name) const { return find(name).value_or(0); }
  // How many entries a list of the file has; nothing where it is none.
  std::optional<Index> length(std::string_view name) const;
  NumberOf numbers() const {
    return [this](std::string_view name) { return find(name); };
  }
  void set(std::string_view name, Index value) { numbers_.insert_or_assign(std::string(name), value); }

  // What every model has.
  Index vocab_size() const { return number("vocab_size"); }
  Index hidden_size() const { return number("hidden_size"); }
  Index num_hidden_layers() const { return number("num_hidden_layers"); }
  Index num_attention_heads() const { return number("num_attention_heads"); }
  Index num_key_value_heads() const { return number("num_key_value_heads"); }
  Index head_dim() const { return number("head_dim"); }
  bool tie_word_embeddings() const { return number("tie_word_embeddings") != 0; }

  // Layers that follow those, which predict further tokens and need not be stored.
  Index num_prediction_layers() const { return number("num_nextn_predict_layers"); }
  bool has_mxfp4() const { return quantization == "mxfp4"; }
  // Whether a quantized model leaves this parameter as it was.
  bool is_left_unquantized(std::string_view parameter) const;

  // Whether the feed-forward part of a layer is experts: those of moe_layers or mlp_layer_types, where there is such a
  // list; else those from first_k_dense_replace on, every decoder_sparse_step-th, but for mlp_only_layers.
  bool is_sparse_layer(Index layer) const;
  // Whether the attention of a layer is linear: as layer_types says, else all but every full_attention_interval-th.
  bool is_linear_layer(Index layer) const;
  // "full_attention", "linear_attention", "sliding_attention", "moe", "mlp": of layer_types, layers_block_type or
  // hybrid_override_pattern; empty where the config does not say.
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
  std::map<std::string, Index, std::less<>> lengths_;                 // of lists
  std::vector<std::string> unquantized_;                              // modules, "lm_head"
  std::vector<Index> mlp_only_layers_;
  std::optional<std::vector<Index>> moe_layers_;
  std::vector<std::string> mlp_layer_types_;  // "sparse", of each layer; may be empty
  std::vector<std::string> layer_types_;      // "linear_attention", of each layer; may be empty
};

Result<ModelConfig> read_config(const std::string& path, Families families = {});

// The rope_scaling of Llama 3.1 and later, whose context was 8192 before it was stretched by `factor`.
Json llama3_rope_scaling(double factor);

// A file that lies beside a checkpoint: in its directory, beside its files, or in the directory's parent. Empty when
// there is none.
std::string find_beside(const Catalog& catalog, std::string_view name);

// The config.json of an open checkpoint; an empty text: there is none.
struct ConfigFile {
  std::string path, text;
  Families families;      // that its model is read with
  bool is_given = false;  // by the user, and not found
  bool is_copied = true;  // to an output; false: a link that leads out of the checkpoint, and the user did not name it

  bool is_there() const { return !text.empty(); }
  // Whether it names a model's type: one that does not, such as a trainer's own, is of no model.
  Result<bool> is_of_model() const;
  Result<ModelConfig> model() const;  // that it describes
};
// The file `given`, if that is not empty; else the one beside the checkpoint (find_beside); else what the format itself
// keeps or makes (Reader::side_file).
Result<ConfigFile> find_config_file(Reader& reader, const std::string& given = {}, Families families = {});

// The model that it describes. Nothing where there is none, or where the one that was found, not given, is no model's.
Result<std::optional<ModelConfig>> config_of(Reader& reader, const std::string& given = {}, Families families = {});

}  // namespace reshard

#include "lib/family/config.h"

#include "lib/base/file.h"
#include "lib/base/json.h"

namespace reshard {
namespace {

constexpr Index kMaxConfigBytes = Index{16} << 20;
constexpr Index kMaxSize = Index{1} << 40;  // of anything a config counts

Result<Index> positive(const Json& json, std::string_view key) {
  const Index v = TRY(json.get_index(key));
  if (v < 1 || v > kMaxSize)
    return corrupt(std::string(key) + ": expected a positive number, got " + std::to_string(v));
  return v;
}

Result<Index> positive_or(const Json& json, std::string_view key, Index otherwise) {
  const Json* member = json.find(key);
  if (!member || member->is_null()) return otherwise;
  return positive(json, key);
}

Result<ModelConfig> parse(const Json& json) {
  ModelConfig c;
  c.model_type = std::string(TRY(json.get_string("model_type")));
  if (const Json* list = json.find("architectures"); list && list->is_array() && list->size() > 0)
    if (const auto items = list->as_array(); items && (*items)[0].is_string())
      c.architecture = std::string(TRY((*items)[0].as_string()));
  c.vocab_size = TRY(positive(json, "vocab_size"));
  c.hidden_size = TRY(positive(json, "hidden_size"));
  c.intermediate_size = TRY(positive(json, "intermediate_size"));
  c.num_hidden_layers = TRY(positive(json, "num_hidden_layers"));
  c.num_attention_heads = TRY(positive(json, "num_attention_heads"));
  c.num_key_value_heads = TRY(positive_or(json, "num_key_value_heads", c.num_attention_heads));
  c.head_dim = TRY(positive_or(json, "head_dim", c.hidden_size / c.num_attention_heads));
  if (c.head_dim < 1 || c.num_attention_heads % c.num_key_value_heads != 0)
    return corrupt("num_attention_heads " + std::to_string(c.num_attention_heads) + " is not a multiple of " +
                   "num_key_value_heads " + std::to_string(c.num_key_value_heads));
  if (const Json* tie = json.find("tie_word_embeddings"); tie && !tie->is_null())
    c.tie_word_embeddings = TRY(json.get_bool("tie_word_embeddings"));
  return c;
}

}  // namespace

Result<ModelConfig> read_config(const std::string& path) {
  const std::string text = TRY(read_whole_file(path, kMaxConfigBytes));
  const Json json = TRY(parse_json(text, path));
  ModelConfig config = TRY(parse(json).context(path));
  config.path = path;
  return config;
}

std::string find_config(const std::string& checkpoint, const std::string& given) {
  if (!given.empty()) return given;
  const std::string directory = is_directory(checkpoint) ? checkpoint : parent_path(checkpoint);
  for (const std::string& place : {directory, parent_path(directory)})
    if (const std::string path = path_join(place, "config.json"); path_exists(path)) return path;
  return {};
}

}  // namespace reshard

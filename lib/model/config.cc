// SPDX-License-Identifier: Apache-2.0
#include "lib/model/config.h"

#include <algorithm>
#include <array>
#include <span>

#include "lib/base/file.h"
#include "lib/base/text.h"
#include "lib/checkpoint/format.h"
#include "lib/checkpoint/side_files.h"
#include "lib/model/family.h"
#include "lib/model/olmo_core.h"

namespace reshard {
namespace {

constexpr Index kMaxSize = Index{1} << 40;  // limit of any number in a config
constexpr std::size_t kShownValue = 40;     // bytes of a value shown in a message
constexpr std::size_t kMaxParts = 64;       // of a model; real ones have three
constexpr int kMaxPartDepth = 3;
constexpr Index kMaxListedLayer = 100'000;  // limit of layer numbers in lists

// Returns the member that names the type of a model; diffusers' configs name its class.
const Json* type_of(const Json& json) {
  for (const std::string_view member : {"model_type", "_class_name"})
    if (const Json* type = json.is_object() ? json.find(member) : nullptr; type && type->is_string()) return type;
  return nullptr;
}
bool names_model_type(const Json& json) { return type_of(json) != nullptr; }

// Defaults that apply if the family has no others.
const ConfigDefault kCommonDefaults[] = {
    {"num_key_value_heads", "num_attention_heads"},
    {"head_dim", "hidden_size/num_attention_heads"},
    {"tie_word_embeddings", "0"},
};

// Positive whole numbers that every known model has.
constexpr std::string_view kSizes[] = {"vocab_size",          "hidden_size",         "num_hidden_layers",
                                       "num_attention_heads", "num_key_value_heads", "head_dim"};

bool is_size(std::string_view name) {
  return std::find(std::begin(kSizes), std::end(kSizes), name) != std::end(kSizes);
}

// Returns the strings of a list, with empty ones for items of other types, or nothing if the member is not a list.
Result<std::optional<std::vector<std::string>>> words_of(const Json& json, std::string_view member) {
  std::optional<std::vector<std::string>> out;
  const Json* const list = json.find(member);
  if (!list || !list->is_array()) return out;
  out.emplace();
  for (const Json& item : TRY(list->as_array()))
    out->emplace_back(item.is_string() ? TRY(item.as_string()) : std::string_view());
  return out;
}

// Translates a list of 0 and 1 to the given words; empty if the member is not a list.
Result<std::vector<std::string>> choices_of(const Json& json, std::string_view member, const std::string& zero,
                                            const std::string& one) {
  std::vector<std::string> out;
  const Json* const list = json.find(member);
  if (!list || !list->is_array()) return out;
  for (const Json& item : TRY(list->as_array())) out.push_back(item.as_index() && *item.as_index() == 0 ? zero : one);
  return out;
}

// Returns transformers' current name for a layer type (configuration_utils.remap_legacy_layer_types).
std::string current_layer_type(const std::string& type) {
  if (type == "mamba") return "linear_attention";
  return type == "attention" ? "full_attention" : type;
}

// As NemotronHConfig._pattern_to_list.
std::string_view layer_type_of_letter(char letter) {
  switch (letter) {
    case 'M':
      return "linear_attention";
    case '*':
      return "full_attention";
    case 'E':
      return "moe";
    case '-':
      return "mlp";
    default:
      return "";
  }
}

// Returns the rows and columns of a block, or nothing if the member is not a pair of positive numbers.
Result<std::optional<std::array<Index, 2>>> sides(const Json& json, std::string_view member) {
  std::optional<std::array<Index, 2>> out;
  const Json* const block = json.find(member);
  if (!block || !block->is_array() || block->size() != 2) return out;
  const std::span<const Json> list = TRY(block->as_array());
  const Index rows = TRY(list[0].as_index()), columns = TRY(list[1].as_index());
  if (rows > 0 && columns > 0) out = {rows, columns};
  return out;
}

// Returns whether a member is this word.
bool says(const Json& json, std::string_view member, std::string_view word) {
  const Json* const value = json.find(member);
  return value && value->is_string() && *value->as_string() == word;
}

// Returns what one of compressed-tensors' groups of modules says of its weights; null if it says nothing.
const Json* weights_of_group(const Json& group) {
  const Json* const weights = group.is_object() ? group.find("weights") : nullptr;
  return weights && weights->is_object() ? weights : nullptr;
}

// Returns whether the weights of a group are of another type than 8-bit floats.
bool has_no_float8(const Json& group) {
  const Json* const weights = weights_of_group(group);
  if (!weights) return false;
  const Json* const bits = weights->find("num_bits");
  return says(*weights, "type", "int") || (bits && bits->as_index() && *bits->as_index() != 8);
}

// Returns the scales of a group, or nothing if they are not known.
Result<std::optional<Float8Scales>> scales_of_group(const Json& group) {
  std::optional<Float8Scales> out;
  const Json* const weights = weights_of_group(group);
  if (!weights) return out;
  const Json *const bits = weights->find("num_bits"), *const symmetric = weights->find("symmetric");
  const bool is_8_bit = bits && bits->as_index() && *bits->as_index() == 8;
  if (!says(*weights, "type", "float") || !is_8_bit) return out;
  if (symmetric && symmetric->is_bool() && !TRY(symmetric->as_bool())) return out;
  Float8Scales scales{"_scale", 0, 0, true, true};
  if (says(*weights, "strategy", "channel")) scales.block_rows = 1;
  if (says(*weights, "strategy", "block")) {
    const auto block = TRY(sides(*weights, "block_structure"));
    if (!block) return out;
    scales.block_rows = (*block)[0];
    scales.block_columns = (*block)[1];
  } else if (!says(*weights, "strategy", "channel") && !says(*weights, "strategy", "tensor")) {
    return out;
  }
  out = scales;
  return out;
}

// Returns the first group of compressed-tensors' TransformConfig that changes activations, and not only weights, where
// its rotation is part of the stored values; empty if there is none.
Result<std::string> find_online_transform(const Json& transforms) {
  const Json* const groups = transforms.is_object() ? transforms.find("config_groups") : nullptr;
  if (!groups || !groups->is_object()) return std::string();
  for (const Json::Member& group : TRY(groups->as_object())) {
    const Json* const applied = group.value.is_object() ? group.value.find("apply") : nullptr;
    if (!applied || !applied->is_array()) continue;
    for (const Json& place : TRY(applied->as_array())) {
      const Json* const location = place.is_object() ? place.find("location") : nullptr;
      if (location && location->is_string() && !TRY(location->as_string()).starts_with("weight_"))
        return std::string(group.key);
    }
  }
  return std::string();
}

}  // namespace

Result<ModelConfig> ModelConfig::parse(const Json& json, std::string path, Families families) {
  ModelConfig config;
  config.families = families;
  config.path = std::move(path);
  config.file = json;
  const Json* const type = type_of(json);
  config.model_type = std::string(TRY(type ? type->as_string() : json.get_string("model_type")));
  const Json* const text = json.find("text_config");
  const Json* const text_type = text ? type_of(*text) : nullptr;
  if (text_type) config.text_model_type = std::string(TRY(text_type->as_string()));
  TRY(config.read(json));
  if (text && text->is_object()) {
    TRY(config.read(*text));
    const Json* const tied = json.find("tie_word_embeddings");  // the head belongs to the whole model
    if (tied && tied->is_bool()) config.set("tie_word_embeddings", TRY(tied->as_bool()) ? 1 : 0);
  }
  config.read_parts(json, {}, 1);
  const Status makes_sense = config.make_whole();
  // For a model of no known family nothing is derived, and these numbers may be missing.
  if (!makes_sense && family_of_model_type(config.model_type, config.text_model_type, config.families))
    return makes_sense.error();
  return config;
}

// Malformed members are skipped: they may not be parts of the model.
void ModelConfig::read_parts(const Json& json, const std::string& prefix, int depth) {
  const auto members = json.as_object();
  if (!members) return;
  for (const Json::Member& member : *members) {
    if (!member.value.is_object() || parts.size() == kMaxParts) continue;
    const std::string name = prefix + member.key;
    ModelConfig nested;
    nested.path = path;
    nested.part = name;
    if (const Json* type = type_of(member.value); type && nested.read(member.value)) {
      nested.model_type = std::string(*type->as_string());
      parts.push_back(std::move(nested));
    }
    if (depth < kMaxPartDepth) read_parts(member.value, name + ".", depth + 1);
  }
}

// Later calls override earlier ones: a text_config describes the language model better than the config around it.
Status ModelConfig::read(const Json& json) {
  for (const Json::Member& member : TRY(json.as_object())) {
    if (member.value.is_bool()) {
      set(member.key, TRY(member.value.as_bool()) ? 1 : 0);
    } else if (const auto n = member.value.as_index(); member.value.is_integer() && n) {
      set(member.key, *n);
    } else if (member.value.is_array()) {
      lengths_.insert_or_assign(member.key, std::ssize(TRY(member.value.as_array())));
    } else if (member.value.is_null()) {
      numbers_.insert_or_assign(member.key, std::nullopt);
    } else if (is_size(member.key) && family_of_model_type(model_type, text_model_type, families)) {
      const std::string text = to_text(member.value);
      return corrupt(member.key + ": expected a positive number, got " + printable(text.substr(0, kShownValue)) +
                     (text.size() > kShownValue ? "..." : ""));
    } else if (member.value.is_object() && !names_model_type(member.value)) {
      for (const Json::Member& inner : TRY(member.value.as_object()))
        if (const auto number = inner.value.as_index(); inner.value.is_integer() && number)
          set(member.key + "." + inner.key, *number);
    }
  }
  if (const Json* list = json.find("architectures"); list && list->is_array() && list->size() > 0)
    if (const auto items = list->as_array(); items && (*items)[0].is_string())
      architecture = std::string(TRY((*items)[0].as_string()));
  for (const std::string_view key : {"torch_dtype", "dtype"})
    if (const Json* name = json.find(key); name && name->is_string()) dtype = std::string(TRY(name->as_string()));
  if (const Json* list = json.find("mlp_only_layers"); list && list->is_array())
    for (const Json& layer : TRY(list->as_array())) mlp_only_layers_.push_back(TRY(layer.as_index()));
  std::sort(mlp_only_layers_.begin(), mlp_only_layers_.end());
  if (const Json* list = json.find("moe_layers"); list && list->is_array()) {
    moe_layers_.emplace();
    for (const Json& layer : TRY(list->as_array()))
      if (const auto n = layer.as_index()) moe_layers_->push_back(*n);
    std::sort(moe_layers_->begin(), moe_layers_->end());
  }
  TRY(read_layer_types(json));
  const Json* quantized = json.find("quantization_config");
  if (!quantized) quantized = json.find("quantization");  // mlx-lm's key; it writes both (mlx_lm/utils.py)
  if (quantized && quantized->is_object()) TRY(read_quantization(*quantized));
  return {};
}

// Reads the layer types, as transformers lists them and as published configs of some models do: Nemotron-H's "M-M*E",
// Kimi Linear's layer numbers (from 1), and MiMo's lists of 0 and 1.
Status ModelConfig::read_layer_types(const Json& json) {
  for (const std::string_view member : {"layer_types", "layers_block_type"})
    if (auto types = TRY(words_of(json, member))) layer_types_ = *std::move(types);
  for (std::string& type : layer_types_) type = current_layer_type(type);
  if (auto types = TRY(words_of(json, "mlp_layer_types"))) mlp_layer_types_ = *std::move(types);
  const Json* const pattern = json.find("hybrid_override_pattern");
  const std::string_view letters = pattern && pattern->is_string() ? TRY(pattern->as_string()) : std::string_view();
  if (layer_types_.empty() && std::ssize(letters) <= kMaxListedLayer)
    for (const char letter : letters) layer_types_.emplace_back(layer_type_of_letter(letter));
  if (const Json* linear = json.find("linear_attn_config"); linear && linear->is_object() && layer_types_.empty()) {
    TRY(read_numbered_layers(*linear, "kda_layers", "linear_attention"));
    TRY(read_numbered_layers(*linear, "full_attn_layers", "full_attention"));
  }
  if (layer_types_.empty())
    layer_types_ = TRY(choices_of(json, "hybrid_layer_pattern", "full_attention", "sliding_attention"));
  if (mlp_layer_types_.empty()) mlp_layer_types_ = TRY(choices_of(json, "moe_layer_freq", "dense", "sparse"));
  return {};
}

Status ModelConfig::read_numbered_layers(const Json& json, std::string_view member, const std::string& type) {
  const Json* const list = json.find(member);
  if (!list || !list->is_array()) return {};
  for (const Json& item : TRY(list->as_array())) {
    const auto number = item.as_index();
    if (!number || *number < 1 || *number > kMaxListedLayer) continue;
    layer_types_.resize(std::max<std::size_t>(layer_types_.size(), *number));
    layer_types_[static_cast<std::size_t>(*number) - 1] = type;
  }
  return {};
}

// Reads compressed-tensors' QuantizationConfig: the scales that all groups with 8-bit floats have in common. Other
// groups have packed weights, which their tensors describe.
Status ModelConfig::read_compressed_tensors(const Json& json) {
  if (const Json* const transforms = json.find("transform_config"))
    online_transform = TRY(find_online_transform(*transforms));
  const Json* const groups = json.find("config_groups");
  if (!groups || !groups->is_object()) return {};
  for (const Json::Member& group : TRY(groups->as_object())) {
    if (has_no_float8(group.value)) continue;
    const auto scales = TRY(scales_of_group(group.value));
    if (!scales || (float8 && *float8 != *scales)) {
      float8.reset();
      return {};
    }
    float8 = scales;
  }
  return {};
}

Status ModelConfig::read_quantization(const Json& json) {
  const bool is_mlx = !json.find("quant_method") && json.find("group_size") && json.find("bits");
  quantization = is_mlx ? "mlx" : std::string(TRY(json.get_string("quant_method")));
  float8.reset();
  online_transform.clear();
  if (quantization == "fp8") {
    float8 = Float8Scales{"_scale_inv", 0, 0, true};
    if (const auto block = TRY(sides(json, "weight_block_size")))
      float8 = Float8Scales{"_scale_inv", (*block)[0], (*block)[1]};
  }
  if (quantization == "fbgemm_fp8") float8 = Float8Scales{"_scale", 1, 0, true};
  if (quantization == "compressed-tensors") TRY(read_compressed_tensors(json));
  if (const Json* modules = json.find("modules_to_not_convert"); modules && modules->is_array())
    for (const Json& module : TRY(modules->as_array())) unquantized_.emplace_back(TRY(module.as_string()));
  std::sort(unquantized_.begin(), unquantized_.end());
  return {};
}

Status ModelConfig::make_whole() {
  TRY(derive());
  return check();
}

Status ModelConfig::derive() {
  // A family's defaults replace missing numbers; the common defaults also replace null.
  const auto fill = [this](const ConfigDefault& d) {
    if (const auto n = evaluate(d.formula, numbers())) set(d.name, *n);
  };
  if (const Family* family = family_of_model_type(model_type, text_model_type, families)) {
    if (!find("num_hidden_layers") && !layer_types_.empty()) set("num_hidden_layers", std::ssize(layer_types_));
    for (const ConfigDefault& d : family->defaults)
      if (!numbers_.contains(d.name)) fill(d);
  }
  for (const std::string_view name : {"hidden_size", "num_attention_heads"})
    if (number(name) < 1) return corrupt(std::string(name) + ": expected a positive number, got " + shown(name));
  for (const ConfigDefault& d : kCommonDefaults)
    if (!find(d.name)) fill(d);
  return {};
}

Status ModelConfig::check() const {
  for (const std::string_view name : kSizes)
    if (number(name) < 1 || number(name) > kMaxSize)
      return corrupt(std::string(name) + ": expected a positive number, got " + shown(name));
  if (num_attention_heads() % num_key_value_heads() != 0)
    return corrupt("num_attention_heads " + std::to_string(num_attention_heads()) + " is not a multiple of " +
                   "num_key_value_heads " + std::to_string(num_key_value_heads()));
  return {};
}

std::string ModelConfig::shown(std::string_view name) const {
  const auto n = find(name);
  return n ? std::to_string(*n) : "nothing";
}

std::optional<Index> ModelConfig::find(std::string_view name) const {
  const auto found = numbers_.find(name);
  return found == numbers_.end() ? std::nullopt : found->second;
}

std::optional<Index> ModelConfig::length(std::string_view name) const {
  const auto found = lengths_.find(name);
  return found == lengths_.end() ? std::nullopt : std::optional(found->second);
}

Dims Float8Scales::shape(const Dims& matrix) const {
  return {block_rows > 0 ? ceil_div(matrix[0], block_rows) : 1,
          block_columns > 0 ? ceil_div(matrix[1], block_columns) : 1};
}

bool is_shape_of_scales(const Dims& shape, const Dims& expected) {
  return shape == expected || (volume(shape) == 1 && volume(expected) == 1);
}

bool ModelConfig::is_left_unquantized(std::string_view parameter) const {
  for (std::size_t dot = parameter.find('.'); dot != std::string_view::npos; dot = parameter.find('.', dot + 1))
    if (std::binary_search(unquantized_.begin(), unquantized_.end(), parameter.substr(0, dot))) return true;
  return false;
}

bool ModelConfig::is_sparse_layer(Index layer) const {
  const auto has = [&](const std::vector<Index>& list) { return std::binary_search(list.begin(), list.end(), layer); };
  if (number("num_experts") < 1) return false;
  if (moe_layers_) return has(*moe_layers_);
  if (layer < std::ssize(mlp_layer_types_)) return mlp_layer_types_[layer] == "sparse";
  if (layer < number("first_k_dense_replace") || has(mlp_only_layers_)) return false;
  return (layer + 1) % std::max<Index>(1, find("decoder_sparse_step").value_or(1)) == 0;
}

std::string_view ModelConfig::layer_type(Index layer) const {
  return layer >= 0 && layer < std::ssize(layer_types_) ? layer_types_[layer] : std::string_view();
}

bool ModelConfig::is_linear_layer(Index layer) const {
  if (!layer_types_.empty()) return layer_type(layer) == "linear_attention" || layer_type(layer) == "conv";
  const Index interval = number("full_attention_interval");
  return interval > 0 && (layer + 1) % interval != 0;
}

Result<ModelConfig> read_config(const std::string& path, Families families) {
  const std::string text = TRY(read_whole_file(path, kMaxConfigBytes));
  const Json json = TRY(parse_json(text, path));
  return ModelConfig::parse(json, path, families).context(path);
}

Json llama3_rope_scaling(double factor) {
  return Json::object()
      .set("factor", factor)
      .set("high_freq_factor", 4.0)
      .set("low_freq_factor", 1.0)
      .set("original_max_position_embeddings", 8192)
      .set("rope_type", "llama3");
}

Result<std::string> find_beside(const Catalog& catalog, std::string_view name) {
  std::vector<std::string> places = {catalog.root};
  for (std::uint32_t file = 0; file < catalog.files.size(); ++file)
    if (std::string place = parent_path(catalog.file_path(file)); place != places.back())
      places.push_back(std::move(place));
  for (const std::string& file : catalog.metadata_files) places.push_back(parent_path(path_join(catalog.root, file)));
  if (!catalog.latest_file.empty()) places.push_back(parent_path(path_join(catalog.root, catalog.latest_file)));
  places.push_back(parent_path(catalog.root));
  for (const std::string& place : places)
    if (std::string path = path_join(place, std::string(name)); TRY(path_exists(path))) return path;
  return std::string();
}

Result<bool> ConfigFile::is_of_model() const { return names_model_type(TRY(parse_json(text, path))); }

Result<ModelConfig> ConfigFile::model() const {
  return ModelConfig::parse(TRY(parse_json(text, path)), path, families).context(path);
}

Result<ConfigFile> find_config_file(Reader& reader, const std::string& given, Families families) {
  ConfigFile out;
  out.families = families;
  out.is_given = !given.empty();
  out.path = out.is_given ? given : TRY(find_beside(reader.catalog(), kConfigFile));
  if (!out.path.empty()) {
    out.text = TRY(read_whole_file(out.path, kMaxConfigBytes));
  } else if (auto kept = TRY(reader.side_file(std::string(kConfigFile), kMaxConfigBytes))) {
    out.path = path_join(reader.catalog().root, kConfigFile);
    out.text = *std::move(kept);
  }
  if (const auto json = parse_json(out.text, out.path); json && is_config_of_olmo_core(*json))
    out.text = python_text(TRY(config_of_olmo_core(*json).context(out.path)));
  // An interrupted writer may leave an empty file. Treating it as absent would hide that.
  if (!out.path.empty() && out.text.empty()) return corrupt(out.path + ": the file is empty");
  return out;
}

Result<std::optional<ModelConfig>> config_of(Reader& reader, const std::string& given, Families families) {
  const ConfigFile file = TRY(find_config_file(reader, given, families));
  if (!file.is_there()) return std::optional<ModelConfig>();
  const Json json = TRY(parse_json(file.text, file.path));
  if (!file.is_given && !names_model_type(json)) return std::optional<ModelConfig>();
  return std::optional<ModelConfig>(TRY(ModelConfig::parse(json, file.path, families).context(file.path)));
}

}  // namespace reshard

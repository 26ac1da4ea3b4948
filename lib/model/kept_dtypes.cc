// SPDX-License-Identifier: Apache-2.0
#include "lib/model/kept_dtypes.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/model/family_file.h"

namespace reshard {
namespace {

// Globs that match parameter names.
struct Float32Globs {
  std::vector<std::string> always, in_float16;
};

struct KeptTable {
  std::string version;
  std::map<std::string, Float32Globs, std::less<>> of_type;

  const Float32Globs* find(std::string_view model_type) const {
    const auto found = of_type.find(model_type);
    return found == of_type.end() ? nullptr : &found->second;
  }
};

Result<std::vector<std::string>> texts(const Json& json, std::string_view member) {
  std::vector<std::string> out;
  if (!json.contains(member)) return out;
  for (const Json& item : TRY(json.get_array(member))) out.emplace_back(TRY(item.as_string()));
  return out;
}

Result<KeptTable> parse_table(std::string_view text) {
  const Json json = TRY(parse_json(text, "kept_float32.json"));
  KeptTable out;
  out.version = TRY(json.get_string("transformers"));
  for (const Json& group : TRY(json.get_array("kept"))) {
    Float32Globs kept;
    kept.always = TRY(texts(group, "always"));
    kept.in_float16 = TRY(texts(group, "float16"));
    for (std::string& type : TRY(texts(group, "model_types"))) out.of_type.emplace(std::move(type), kept);
  }
  for (std::string& type : TRY(texts(json, "others"))) out.of_type.emplace(std::move(type), Float32Globs{});
  return out;
}

const KeptTable& table() {
  static const KeptTable made = [] {
    auto parsed = parse_table(builtin_kept_dtypes());
    if (parsed) return *std::move(parsed);
    std::fprintf(stderr, "%s\n", parsed.error().message().c_str());  // a test parses the built-in table
    std::abort();
  }();
  return made;
}

bool keeps(std::string_view model_type, std::string_view name, DType as) {
  const Float32Globs* const kept = table().find(model_type);
  return kept &&
         (any_glob_matches(kept->always, name) || (as != DType::kBFloat16 && any_glob_matches(kept->in_float16, name)));
}

// Returns whether the table keeps a name for the model types of the config or, without one, of the family.
bool keeps(const Family* family, const ModelConfig* config, std::string_view name, DType as) {
  const auto keeps_it = [&](std::string_view model_type) { return keeps(model_type, name, as); };
  if (config)
    return keeps_it(config->model_type) || keeps_it(config->text_model_type) ||
           std::any_of(config->parts.begin(), config->parts.end(),
                       [&](const ModelConfig& part) { return keeps_it(part.model_type); });
  return family && (std::any_of(family->model_types.begin(), family->model_types.end(), keeps_it) ||
                    std::any_of(family->text_model_types.begin(), family->text_model_types.end(), keeps_it));
}

bool is_narrow(DType as) { return byte_size(as) < byte_size(DType::kFloat32); }

}  // namespace

std::optional<DType> kept_dtype(const Family& family, const ModelConfig* config, const NameRule& rule, DType as) {
  if (!rule.dtype.empty()) return dtype_from_torch(rule.dtype);
  if (!is_narrow(as)) return std::nullopt;
  const StoredRule* const in_memory = stored_rule(family, rule, Convention::kTransformers);
  const std::string& name = in_memory ? in_memory->stored : rule.hf;
  return keeps(&family, config, name, as) ? std::optional(DType::kFloat32) : std::nullopt;
}

std::optional<DType> kept_dtype(const Family* family, const ModelConfig* config, std::string_view parameter, DType as) {
  if (const auto parsed = family ? parse_name(*family, parameter) : std::nullopt)
    return parsed->is_of_quantized() ? std::nullopt : kept_dtype(*family, config, *parsed->rule, as);
  const bool is_kept = is_narrow(as) && keeps(family, config, parameter, as);
  return is_kept ? std::optional(DType::kFloat32) : std::nullopt;
}

bool knows_kept_dtypes(const ModelConfig& config) { return table().find(config.model_type) != nullptr; }

std::string_view kept_dtypes_version() { return table().version; }

}  // namespace reshard

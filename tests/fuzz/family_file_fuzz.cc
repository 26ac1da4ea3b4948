// Fuzzes family files: accepted files can be queried for names, and their formulas terminate.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/model/family_file.h"
#include "lib/model/formula.h"
#include "lib/model/parameters.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::family_file_fuzz {
namespace {

void ask(const Family& family, const std::string& name) {
  const auto parsed = parse_name(family, name);
  if (!parsed) return;
  require(parsed->rule != nullptr || parsed->stored != nullptr);
  (void)tensor_parallel_cut(*parsed);
  if (!parsed->is_packed() && parsed->rule) (void)canonical_name(*parsed);
}

}  // namespace

FUZZ_TARGET(family_file)(const std::uint8_t* data, std::size_t size) {
  const auto family = parse_family({reinterpret_cast<const char*>(data), size}, "input");
  if (!family) {
    require(!family.error().message().empty());
    return 0;
  }
  for (const NameRule& rule : family->rules) {
    ask(*family, format_pattern(rule.hf, 3, 5));
    ask(*family, "_orig_mod.model." + format_pattern(rule.hf, 0, 0) + "_scale_inv");
    for (const ConventionInfo& row : kConventions)
      (void)rename_key(*family, "optimizer.state." + format_pattern(rule.hf, 1, 2) + ".exp_avg", row.convention);
  }
  for (const ConventionTable& table : family->conventions)
    for (const StoredRule& rule : table.rules) ask(*family, format_pattern(rule.stored, 3, 5));
  static const ModelConfig config = *ModelConfig::parse(
      *parse_json(R"({"model_type": "llama", "vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2,
                      "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40})",
                  "config"),
      "config");
  if (const auto all = parameters(*family, config)) {
    require(count_elements(*all) >= 0);
    for (const Parameter& p : *all) require(checked_volume(p.shape).has_value());
  } else {
    require(!all.error().message().empty());
  }
  return 0;
}

}  // namespace reshard::family_file_fuzz

// Fuzzes config.json: an accepted config of a known family has the numbers that every model has, and its parameters can
// be listed or are refused.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "lib/base/json.h"
#include "lib/model/config.h"
#include "lib/model/family.h"
#include "lib/model/olmo_core.h"
#include "lib/model/parameters.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::config_fuzz {

FUZZ_TARGET(config)(const std::uint8_t* data, std::size_t size) {
  const auto json = parse_json({reinterpret_cast<const char*>(data), size}, "input");
  if (!json) return 0;
  if (is_config_of_olmo_core(*json)) {
    const auto made = config_of_olmo_core(*json);
    require(made ? made->contains("model_type") : !made.error().message().empty());
  }
  const auto config = ModelConfig::parse(*json, "input");
  if (!config) {
    require(!config.error().message().empty());
    return 0;
  }
  for (const Index layer : {Index{0}, Index{1}, Index{61}, Index{1} << 41}) (void)config->is_sparse_layer(layer);
  for (const std::string_view name : {"lm_head.weight", "", "model.layers.0.mlp.gate.weight"})
    (void)config->is_left_unquantized(name);
  const Family* family = family_of_model_type(config->model_type);
  if (!family) return 0;
  require(config->vocab_size() > 0 && config->hidden_size() > 0 && config->num_hidden_layers() > 0 &&
          config->num_attention_heads() > 0 && config->num_key_value_heads() > 0 && config->head_dim() > 0);
  // Listing thousands of tensors is no different from listing a few, and slow.
  const auto all_experts = checked_mul(config->num_hidden_layers() + 1, config->find("num_experts").value_or(1));
  if (all_experts && *all_experts > 2000 && *all_experts < 5'000'000) return 0;
  for (const auto& all : {parameters(*family, *config), optional_parameters(*family, *config)}) {
    if (!all) continue;
    require(count_elements(*all) >= 0);
    for (const Parameter& p : *all) require(checked_volume(p.shape).has_value());
  }
  return 0;
}

}  // namespace reshard::config_fuzz

// SPDX-License-Identifier: Apache-2.0
#include "formats/colossalai/names.h"

#include <algorithm>
#include <array>

#include "lib/base/text.h"

namespace reshard::colossalai {
namespace {

constexpr std::size_t kDigits = 5;

// Removes "-00012" from the end and returns the number.
std::optional<Index> take_last_number(std::string_view& name) {
  if (name.size() < kDigits + 1 || name[name.size() - kDigits - 1] != '-') return std::nullopt;
  const auto value = parse_number(name.substr(name.size() - kDigits));
  if (value) name.remove_suffix(kDigits + 1);
  return value;
}

bool take_end(std::string_view& name, std::string_view ending) {
  if (!name.ends_with(ending)) return false;
  name.remove_suffix(ending.size());
  return true;
}

// Removes "-stage-00001" or "-stage-00001-00002" from the end.
bool take_stage(std::string_view& name, Index& stage, Index& expert) {
  const auto last = take_last_number(name);
  if (!last) return false;
  stage = *last;
  if (const auto first = take_last_number(name)) {
    stage = *first;
    expert = *last;
  }
  return take_end(name, "-stage");
}

struct Base {
  std::string_view name, ending;
  Part part;
};
constexpr std::array<Base, 4> kBases = {{
    {"pytorch_model", ".bin", Part::kModel},
    {"model", ".safetensors", Part::kModel},
    {"pytorch_optim", ".bin", Part::kOptimizer},
    {"optimizer", ".safetensors", Part::kOptimizer},
}};

}  // namespace

std::optional<ShardName> parse_shard_name(std::string_view name) {
  for (const Base& base : kBases) {
    std::string_view rest = name;
    if (!take_end(rest, base.ending)) continue;
    ShardName out;
    out.part = base.part;
    const auto shard = take_last_number(rest);
    if (!shard || rest.ends_with("-of")) return std::nullopt;
    out.shard = *shard;
    if (take_end(rest, "-shard") && !take_stage(rest, out.stage, out.expert)) return std::nullopt;
    const bool has_prefix = rest.size() > base.name.size() && rest[base.name.size()] == '.';
    if (rest.starts_with(base.name) && (rest.size() == base.name.size() || has_prefix)) return out;
  }
  return std::nullopt;
}

std::optional<IndexName> parse_index_name(std::string_view name) {
  if (!take_end(name, ".json")) return std::nullopt;
  for (const Base& base : kBases) {
    const std::string stem = std::string(base.name) + std::string(base.ending) + ".index";
    if (!name.starts_with(stem)) continue;
    std::string_view rest = name.substr(stem.size());
    IndexName out;
    out.part = base.part;
    if (rest.empty() || rest.starts_with('.')) return out;
    if (take_stage(rest, out.stage, out.expert) && rest.empty()) return out;
  }
  return std::nullopt;
}

bool is_step_name(std::string_view name) {
  return take(name, "epoch-") && take_number(name) && take(name, "_step-") && is_digits(name);
}

}  // namespace reshard::colossalai

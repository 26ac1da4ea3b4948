// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/header_metadata.h"

#include <algorithm>
#include <map>
#include <optional>

#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr std::string_view kTensorNames = "tensor_names";
constexpr std::string_view kPlain = "Tensor";

// A tensor of torchao's list.
struct TorchaoWeight {
  std::string text;     // the entry of the weight
  bool is_packed;       // stored as several tensors
  std::string renamed;  // name in the output; empty: not seen yet
};
using DescribedTensors = std::map<std::string, TorchaoWeight, std::less<>>;

// Returns the tensors that the metadata describes; none if torchao did not write it.
Result<DescribedTensors> described_tensors(const Catalog& source) {
  DescribedTensors out;
  std::map<std::string_view, std::string_view> entries;
  for (const auto& [key, value] : source.header_metadata) entries.emplace(key, value);
  const auto list = entries.find(kTensorNames);
  if (list == entries.end()) return out;
  const std::string where = source.where() + ": __metadata__: ";
  const auto names = parse_json(list->second, where + std::string(kTensorNames));
  if (!names || !names->is_array()) return out;
  for (const Json& item : TRY(names->as_array())) {
    if (!item.is_string()) return DescribedTensors();
    const std::string name(TRY(item.as_string()));
    const auto entry = entries.find(name);
    if (entry == entries.end())
      return corrupt(where + std::string(kTensorNames) + " lists '" + printable(name) + "', but has no entry for it");
    const Json description = TRY(parse_json(entry->second, where + printable(name)));
    const Json* const type = description.find("_type");
    const bool is_packed = type && type->is_string() && TRY(type->as_string()) != kPlain;
    out.emplace(name, TorchaoWeight{std::string(entry->second), is_packed, ""});
  }
  return out;
}

// A stored tensor that is a part of a described weight: "a._weight_qdata" of "a.weight".
struct PartOf {
  DescribedTensors::iterator weight;
  std::string tail;  // of its name: "._weight_qdata"
  std::string leaf;  // ".weight"
};

std::optional<PartOf> part_of(DescribedTensors& described, const std::string& stored) {
  const std::size_t dot = stored.rfind('.');
  if (dot == std::string::npos || stored.compare(dot, 2, "._") != 0) return std::nullopt;
  const std::string module = stored.substr(0, dot);
  for (std::size_t end = dot + 2; (end = stored.find('_', end + 1)) != std::string::npos;) {
    std::string leaf = "." + stored.substr(dot + 2, end - dot - 2);
    const auto weight = described.find(module + leaf);
    if (weight != described.end() && weight->second.is_packed) return PartOf{weight, stored.substr(dot), leaf};
  }
  return std::nullopt;
}

// Records the output's name for the weight to which a tensor belongs.
Status follow(DescribedTensors& described, const CopiedTensor& copied) {
  const Tensor& from = *copied.from;
  const TargetTensor& to = *copied.to;
  if (const auto plain = described.find(from.name); plain != described.end()) {
    plain->second.renamed = to.name;
    return {};
  }
  const auto part = part_of(described, from.name);
  if (!part) return {};
  const std::string what = "'" + printable(part->weight->first) + "', which the __metadata__ of the headers describes";
  if (to.dtype != from.dtype || to.shape != from.shape)
    return unsupported(tensor_text(from.name) + " is a part of " + what + ": its dtype and shape cannot be changed");
  if (!to.name.ends_with(part->tail))
    return unsupported(tensor_text(from.name) + " is a part of " + what + ": loaders would not find it as '" +
                       printable(to.name) + "'");
  std::string renamed = to.name.substr(0, to.name.size() - part->tail.size()) + part->leaf;
  std::string& known = part->weight->second.renamed;
  if (!known.empty() && known != renamed)
    return unsupported(tensor_text(from.name) + " is a part of " + what + ": its parts would belong to two modules, '" +
                       printable(known) + "' and '" + printable(renamed) + "'");
  known = std::move(renamed);
  return {};
}

}  // namespace

Result<HeaderMetadata> copied_metadata(const Catalog& source, const std::vector<CopiedTensor>& tensors, bool is_exact) {
  HeaderMetadata out;
  if (source.header_metadata.empty()) return out;
  DescribedTensors described = TRY(described_tensors(source));
  for (const CopiedTensor& t : tensors)
    if (t.from) TRY(follow(described, t));
  Json names = Json::array();
  for (const auto& [name, d] : described) {
    if (d.renamed.empty()) continue;
    names.push_back(d.renamed);
    out.entries.emplace_back(d.renamed, d.text);
    out.needed += d.is_packed;
  }
  if (names.size() > 0) out.entries.emplace_back(kTensorNames, to_text(names));
  for (const auto& [key, value] : source.header_metadata)
    if (is_exact && key != "format" && !described.contains(key) && (described.empty() || key != kTensorNames))
      out.entries.emplace_back(key, value);
  return out;
}

}  // namespace reshard

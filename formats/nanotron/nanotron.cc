// SPDX-License-Identifier: Apache-2.0
#include "formats/nanotron/nanotron.h"

#include "lib/base/checked.h"
#include "lib/base/file.h"
#include "lib/base/text.h"

namespace reshard {
namespace nanotron {
namespace {

bool take_rank(std::string_view& text, std::string_view kind, Index& rank, Index& ranks) {
  if (!take(text, kind)) return false;
  const auto r = take_number(text);
  const auto n = r && take(text, "-of-") ? take_number(text) : std::nullopt;
  if (!n || *r >= *n || *n > kMaxMeshRanks) return false;
  rank = *r;
  ranks = *n;
  return true;
}

// Returns whether this is the directory of a step. EasyDeL has a file of the same name next to its `model`.
Result<bool> is_step(const PathSnapshot& place) {
  if (!place.has_file(kMetadataFile) || !place.has_directory("model")) return false;
  if (place.has_file(kConfigFile)) return true;
  const auto text = TRY(place.text_of(kMetadataFile, Index{1} << 20));
  return text && text->find("\"tp\"") != text->npos;
}

// Parses "None" or a number.
Result<std::optional<Index>> bound(std::string_view text) {
  if (text == "None") return std::optional<Index>();
  const auto n = parse_number(text);
  if (!n) return corrupt("expected a number or None, got '" + printable(text.substr(0, 40)) + "'");
  return n;
}

// Parses "0,32,None|None,None,None", slices of a tensor of this shape.
Result<Box> parse_box(std::string_view text, const Dims& shape) {
  const std::vector<std::string> slices = split(text, '|');
  if (slices.size() != static_cast<std::size_t>(shape.rank()))
    return corrupt("expected " + count_of(shape.rank(), "slice") + ", got " + std::to_string(slices.size()));
  Box box = whole(shape);
  for (int d = 0; d < shape.rank(); ++d) {
    const std::vector<std::string> parts = split(slices[d], ',');
    if (parts.size() != 3)
      return corrupt("expected start, stop and step, got " + count_of(std::ssize(parts), "number"));
    const Index begin = TRY(bound(parts[0])).value_or(0), end = TRY(bound(parts[1])).value_or(shape[d]);
    if (TRY(bound(parts[2])).value_or(1) != 1) return unsupported("a step of " + printable(parts[2]));
    if (begin > end || end > shape[d])
      return corrupt("slice " + std::to_string(begin) + ":" + std::to_string(end) + " of " + std::to_string(shape[d]));
    box.origin[d] = begin;
    box.shape[d] = end - begin;
  }
  return box;
}

}  // namespace

Result<const PathSnapshot*> step_directory(const PathSnapshot& place) {
  if (TRY(is_step(place))) return &place;
  const auto latest = TRY(place.text_of(kLatestFile, 64));
  std::string_view text = latest ? *latest : std::string_view();
  const auto step = take_number(text);
  if (!step || text.find_first_not_of("\r\n ") != std::string_view::npos) return nullptr;
  const PathSnapshot* const there = TRY(place.inside(std::to_string(*step)));
  return TRY(is_step(*there)) ? there : nullptr;
}

std::optional<FileName> parse_file_name(std::string_view name) {
  FileName out;
  constexpr std::string_view kKind = "model_", kEnd = ".safetensors", kRanks = "_pp-rank-";
  if (!take(name, kKind) || !name.ends_with(kEnd)) return std::nullopt;
  name.remove_suffix(kEnd.size());
  take(name, kKind);  // some versions write "model_model_weight.safetensors_pp-rank-..."
  std::string_view rest;
  if (const std::size_t at = name.find(kRanks); at != std::string_view::npos) {
    rest = name.substr(at);
    name = name.substr(0, at);
    if (name.ends_with(kEnd)) name.remove_suffix(kEnd.size());
    Index expert = 0;
    if (!take_rank(rest, kRanks, out.stage, out.stages)) return std::nullopt;
    if (!take_rank(rest, "_tp-rank-", out.rank, out.ranks)) return std::nullopt;
    if (!rest.empty() && !take_rank(rest, "_exp-rank-", expert, out.experts)) return std::nullopt;
  }
  if (name.empty() || !rest.empty()) return std::nullopt;
  out.parameter = name;
  return out;
}

Result<std::vector<LocalBox>> parse_slices(std::string_view text, const Dims& local, const Dims& shape) {
  std::vector<LocalBox> out;
  Index elements = 0;
  for (const std::string& pair : split(text, ';')) {
    const std::size_t hash = pair.find('#');
    if (hash == std::string::npos) return corrupt("expected LOCAL#GLOBAL, got '" + printable(pair.substr(0, 80)) + "'");
    const Box from = TRY(parse_box(std::string_view(pair).substr(0, hash), local).context("local"));
    const Box to = TRY(parse_box(std::string_view(pair).substr(hash + 1), shape).context("global"));
    if (from.shape != to.shape)
      return corrupt("expected slices of one shape, got " + to_string(from.shape) + " and " + to_string(to.shape));
    const auto sum = checked_add(elements, volume(from.shape));
    if (!sum || *sum > volume(local))
      return corrupt("slices of more than the " + to_string(local) + " that are stored");
    elements = *sum;
    out.push_back({to, from.origin});
  }
  return out;
}

namespace {

// Takes a number, which NumPy 2 writes as "np.int64(64)".
std::optional<Index> take_extent(std::string_view& text) {
  const bool is_of_numpy = take(text, "np.int64(");
  const auto number = take_number(text);
  return is_of_numpy && !take(text, ")") ? std::nullopt : number;
}

}  // namespace

Result<Dims> parse_shape(std::string_view text) {
  const auto refuse = [&] { return corrupt("expected a shape, got '" + printable(text.substr(0, 80)) + "'"); };
  if (text.size() < 2 || text.front() != '(' || text.back() != ')') return refuse();
  Dims out;
  for (std::string_view rest = text.substr(1, text.size() - 2); !rest.empty();) {
    const auto n = take_extent(rest);
    if (!n || out.rank() == kMaxRank) return refuse();
    out.push_back(*n);
    if (!rest.empty() && !take(rest, ",")) return refuse();
    take(rest, " ");
  }
  if (!checked_volume(out)) return refuse();
  return out;
}

namespace {

Result<bool> recognises(const PathSnapshot& place) { return TRY(step_directory(place)) != nullptr; }

}  // namespace
}  // namespace nanotron

const Format kNanotronFormat = {
    .name = "nanotron",
    .title = "nanotron",
    .recognises = nanotron::recognises,
    .open = nanotron::open,
    .lay_out = nullptr,
    .holds = StateSupport::kModel,
};

}  // namespace reshard

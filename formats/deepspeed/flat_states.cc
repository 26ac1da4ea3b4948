// SPDX-License-Identifier: Apache-2.0
#include "formats/deepspeed/flat_states.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "formats/tensor_files/flat_runs.h"
#include "lib/base/text.h"

namespace reshard::deepspeed {
namespace {

// Returns the value of a tensor without dimensions as a text, whatever its dtype.
Result<std::string> scalar_of(FilePool& files, const std::string& path, const StoredTensor& tensor) {
  std::array<std::byte, 16> bytes{};
  const std::size_t size = byte_size(tensor.dtype);
  const auto file = TRY(files.open(path));
  TRY(file->read_at(tensor.extent.offset + tensor.start, std::span(bytes).first(size)));
  if (tensor.dtype == DType::kFloat32 && !tensor.big_endian) {
    float value = 0;
    std::memcpy(&value, bytes.data(), sizeof value);
    if (value >= 0 && value < 1e15F && value == static_cast<float>(static_cast<Index>(value)))
      return with_commas(static_cast<Index>(value));
  }
  if (tensor.dtype == DType::kInt64 && !tensor.big_endian) {
    Index value = 0;
    std::memcpy(&value, bytes.data(), sizeof value);
    return with_commas(value);
  }
  std::string out = "0x";
  for (std::size_t i = 0; i < size; ++i) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    out += kDigits[std::to_integer<std::size_t>(bytes[i] >> 4)];
    out += kDigits[std::to_integer<std::size_t>(bytes[i] & std::byte{15})];
  }
  return out;
}

}  // namespace

Status check_stage(const FileSet& set, Index part, const std::vector<RankStates>& ranks) {
  const bool is_third = set.has_rank_models();
  const std::string model = set.models.lower_bound({part, -1})->second;
  for (const RankStates& rank : ranks) {
    const auto& stage = rank.states.stage;
    const bool says_third = stage ? *stage == 3 : rank.states.cuts_parameters;
    if (says_third != is_third || rank.states.cuts_parameters != is_third || (stage && *stage > 3))
      return corrupt(rank.path + ": states of ZeRO " + (stage ? std::to_string(*stage) : "1 or 2") + ", and " +
                     printable(model) + " is the name of model states of ZeRO " + (is_third ? "3" : "1 or 2") +
                     ": files of two saves");
  }
  return {};
}

Status check_steps(FilePool& files, const std::vector<RankStates>& ranks) {
  const RankStates& one = ranks[0];
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const RankStates& other = ranks[r];
    for (std::size_t g = 0; g < std::min(one.states.groups.size(), other.states.groups.size()); ++g) {
      const auto differ = [&](const std::string& name, const std::string& here, const std::string& there) {
        return corrupt(other.path + ": group " + std::to_string(g) + ": " + printable(name) + " is " + there +
                       ", and " + here + " in " + base_name(one.path) + ": files of two steps; copy those of one save");
      };
      for (const auto& [name, tensor] : one.states.groups[g].tensors) {
        const auto& all = other.states.groups[g].tensors;
        const auto found = all.find(name);
        if (tensor.shape().rank() > 0 || found == all.end() || found->second.shape().rank() > 0 ||
            (tensor.crc && tensor.crc == found->second.crc))
          continue;
        const std::string here = TRY(scalar_of(files, one.path, tensor)),
                          there = TRY(scalar_of(files, other.path, found->second));
        if (here != there) return differ(name, here, there);
      }
      const auto& all = other.states.groups[g].values;
      for (const auto& [name, pickle] : one.states.groups[g].values)
        if (const auto found = all.find(name); found != all.end() && found->second != pickle)
          return differ(name, "another", "one number");
    }
  }
  return {};
}

Result<Tensor> join(const FlatParameter& parameter, const std::vector<RankStates>& ranks, std::string name,
                    const std::function<const StoredTensor*(const OptimizerStates&)>& flat) {
  Tensor out;
  out.shape = parameter.parameter.shape;
  out.fragments = out.replicas = FragmentList(out.shape.rank());
  bool is_first = true;
  for (const Run& run : parameter.runs) {
    const StoredTensor* vector = flat(ranks[run.rank].states);
    const auto what = [&] {
      return ranks[run.rank].path + ": group " + std::to_string(parameter.group) + ": " + printable(name);
    };
    if (!vector || vector->shape().rank() != 1)
      return corrupt(what() + ": expected a vector, as on the other ranks: the file belongs to another run");
    if (ranks[run.rank].is_unread) {
      out.dtype = vector->dtype;
      continue;
    }
    const auto end = checked_add(run.at, run.end - run.begin);
    if (!end || *end > vector->shape()[0])
      return corrupt(what() + ": expected " + with_commas(end.value_or(INT64_MAX)) + " numbers, up to the end of '" +
                     printable(parameter.parameter.name) + "', got " + with_commas(vector->shape()[0]) +
                     ": the file was truncated or belongs to another run");
    if (!is_first && out.dtype != vector->dtype)
      return corrupt(what() + ": expected " + std::string(info(out.dtype).torch_name) + " as on other ranks, got " +
                     std::string(info(vector->dtype).torch_name));
    out.dtype = vector->dtype;
    is_first = false;
    for (const Fragment& fragment : fragments_of_run(out.shape, run.begin, run.end, *vector, run.at))
      out.fragments.add(fragment);
  }
  out.name = std::move(name);
  return out;
}

}  // namespace reshard::deepspeed

// SPDX-License-Identifier: Apache-2.0
// Reads the values of torch_dist that are not tensors: common.pt or its item, the optimizer's groups and steps, and
// objects.
#include <algorithm>
#include <array>

#include "formats/dcp/dcp.h"
#include "formats/encoding/torch_archive.h"
#include "formats/megatron/dist_reader.h"
#include "formats/megatron/names.h"
#include "lib/base/text.h"

namespace reshard::megatron {
namespace {

constexpr Index kMaxNothingBytes = 4096;  // limit for the item of a list of one None

}  // namespace

Status ShardedReader::add_groups(pickle::Value groups, Index optimizer) {
  const std::string prefix = "optimizer" + (optimizer > 0 ? "_" + std::to_string(optimizer) : "");
  if (groups.kind() != pickle::Kind::kList) return {};
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].kind() != pickle::Kind::kDict) continue;
    for (std::size_t i = 0; i < groups[g].size(); ++i) {
      const auto word = groups[g].key(i).as_string();
      if (!word || *word == "params") continue;
      const Index number = g;
      const KeyPath path = {prefix, std::string("param_groups"), number, std::string(*word)};
      TRY(add_object(dotted_name(path), path, common_file_, groups[g].value(i)));
    }
  }
  return {};
}

Status ShardedReader::add_values() {
  if (!values_) return {};
  const auto add = [&](const std::string& name, pickle::Value value) {
    return add_object("extra_state." + name, {std::string("extra_state"), name}, common_file_, value);
  };
  const bool is_release = base_name(catalog_.root) == kRelease;  // a release has no iteration
  for (const std::string_view name : {"iteration", "checkpoint_version", "num_floating_point_operations_so_far"})
    if (const auto value = values_->find(name); value && !(is_release && name == "iteration"))
      TRY(add(std::string(name), *value));
  for (const auto& [name, count] : sample_counts(*values_)) TRY(add(name, count));
  if (const auto scheduler = values_->find("opt_param_scheduler")) TRY(add("opt_param_scheduler", *scheduler));
  const auto add_optimizer = [&](pickle::Value optimizer, Index number) -> Status {
    if (optimizer.kind() != pickle::Kind::kDict) return {};
    const auto inner = optimizer.find("optimizer");
    const pickle::Value own = inner && inner->kind() == pickle::Kind::kDict ? *inner : optimizer;
    const auto groups = own.find("param_groups");
    return groups ? add_groups(*groups, number) : Status();
  };
  const auto optimizer = values_->find("optimizer");
  if (!optimizer) return {};
  TRY(add_optimizer(*optimizer, 0));
  if (optimizer->kind() == pickle::Kind::kDict)  // several optimizers, by number
    for (std::size_t i = 0; i < optimizer->size(); ++i)
      if (const auto number = optimizer->key(i).as_int()) TRY(add_optimizer(optimizer->value(i), *number));
  return {};
}

// Returns the step that a plain optimizer stores once for all of its parameters.
Result<std::optional<StoredTensor>> ShardedReader::common_step(pickle::Value optimizer) const {
  std::optional<pickle::Value> value = optimizer;
  for (const std::string_view word : {"optimizer", "state", "common_step"})
    value = value && value->kind() == pickle::Kind::kDict ? value->find(word) : std::nullopt;
  if (!value || !makes_torch_tensor(*value)) return std::optional<StoredTensor>();
  StoredTensor out = TRY(common_->resolve(*value));
  out.extent.file = common_file_;
  return std::optional(std::move(out));
}

// Gives every parameter a step of its own. If there are several optimizers, the second is that of the experts.
Status ShardedReader::add_steps() {
  const auto optimizer = values_ ? values_->find("optimizer") : std::nullopt;
  if (!optimizer || optimizer->kind() != pickle::Kind::kDict) return {};
  std::array<std::optional<StoredTensor>, 2> steps = {TRY(common_step(*optimizer)), {}};
  for (std::size_t i = 0; i < optimizer->size(); ++i)
    if (const auto number = optimizer->key(i).as_int(); number && *number >= 0 && *number < std::ssize(steps))
      steps[*number] = TRY(common_step(optimizer->value(i)));
  std::vector<std::string> parameters;
  for (const Tensor& t : catalog_.tensors())
    if (const StateKey key = split_state_key(t.name); key.kind == StateKind::kOptimizer && key.suffix == ".exp_avg")
      parameters.push_back(key.parameter);
  for (const std::string& parameter : parameters) {
    const bool is_expert = steps[1] && parse_core_name(parameter).is_expert();
    const auto& step = steps[is_expert ? 1 : 0];
    if (!step) continue;
    JoinedTensor joined(state_name(parameter, "step"), step->dtype, step->shape(), state_path(parameter, "step"));
    joined.add(*step);
    TRY(catalog_.add(std::move(joined.tensor)).context(catalog_.root));
    splits_pieces_ = true;
  }
  return {};
}

// Reads the parameter groups of a dp_reshardable optimizer, which are in a separate item.
Status ShardedReader::read_groups(const Blob& blob, Index optimizer) {
  const auto file = TRY(files_.open(stored().file_path(blob.extent.file)));
  auto document = torch_archive::read_object_item(*file, blob.extent.offset, blob.extent.length);
  if (!document) return {};  // reading the object itself reports the error
  groups_.push_back(*std::move(document));
  pickle::Value value = groups_.back().root();
  if (value.kind() == pickle::Kind::kList && value.size() == 1) value = value[0];
  const auto groups = value.kind() == pickle::Kind::kDict ? value.find("param_groups") : std::nullopt;
  return groups ? add_groups(*groups, optimizer) : Status();
}

// Returns whether an extra state is a list of one None. Reads only one item of each length.
Result<bool> ShardedReader::is_nothing(const Blob& blob) {
  if (blob.extent.length > kMaxNothingBytes) return false;
  if (const auto known = nothing_.find(blob.extent.length); known != nothing_.end()) return known->second;
  const auto file = files_.open(stored().file_path(blob.extent.file));
  const Result<pickle::Document> document =
      file ? torch_archive::read_object_item(**file, blob.extent.offset, blob.extent.length) : file.error();
  if (!document && document.error().code() == ErrorCode::kIo) return document.error();
  const bool is = document && document->root().kind() == pickle::Kind::kList && document->root().size() == 1 &&
                  document->root()[0].is_none();
  nothing_.emplace(blob.extent.length, is);
  return is;
}

// Adds the other objects: random states, extra states of modules, and so on.
Status ShardedReader::add_blobs() {
  std::optional<std::size_t> nothing;
  for (std::size_t i = 0; i < stored().blobs.size(); ++i) {
    Blob blob = stored().blobs[i];
    const bool is_empty = is_extra_state(blob.name) && TRY(is_nothing(blob));
    if (is_empty) {  // the same object is stored for every module
      if (nothing) {
        catalog_.blobs[*nothing].copies.push_back(blob.extent);
        continue;
      }
      nothing = catalog_.blobs.size();
      const std::string name = "extra_state._extra_state";
      TRY(add_pickled(name, {name}, blob.extent.file, none_in_a_list()));
      catalog_.blobs.back().extent = blob.extent;
      continue;
    }
    const std::string_view key = without_chain(blob.name);
    if (key.starts_with("optimizer.distributed.dp_group_idx_0.optimizer/"))  // equal on all ranks
      TRY(read_groups(blob, parse_chain(blob.name)));
    const bool is_of_buffers = key.starts_with("optimizer.distributed.");  // lengths and groups, which were read above
    if (is_of_buffers || (!is_training_word(blob.name.substr(0, blob.name.find('/'))) && !is_optimizer_key(key)))
      blob.name = "extra_state." + blob.name;
    blob.path = {blob.name};
    inner_blobs_.emplace(blob.name, i);
    catalog_.blobs.push_back(std::move(blob));
  }
  return {};
}

Result<std::string> ShardedReader::blob_bytes(const Blob& blob) {
  const auto own = inner_blobs_.find(blob.name);
  if (own == inner_blobs_.end()) return TensorFileReader::blob_bytes(blob);
  inner_->use_files(files_);
  return inner_->blob_bytes(stored().blobs[own->second]);
}

std::string ShardedReader::describe(const Blob& blob) {
  const auto own = inner_blobs_.find(blob.name);
  if (own == inner_blobs_.end()) return TensorFileReader::describe(blob);
  inner_->use_files(files_);
  return inner_->describe(stored().blobs[own->second]);
}

}  // namespace reshard::megatron

// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/delta_chain.h"

#include <algorithm>
#include <numeric>

#include "lib/base/file.h"
#include "lib/base/text.h"
#include "lib/convert/lineage.h"
#include "lib/convert/weights/published_delta.h"

namespace reshard {
namespace {

constexpr std::string_view kNew = "new", kOld = "old";

// Returns the recorded digest of the new model's tensor, or of the old one's; "none" if there is none.
std::string digest_of(const Json* tensor, std::string_view model) {
  const std::vector<std::string> digests = merged_digests(tensor);
  return digests.size() == 2 ? digests[model == kNew ? 0 : 1] : "none";
}

// Returns the plan's tensors in the order of their sizes.
std::vector<std::size_t> smallest_first(const Conversion& patch) {
  const auto& planned = patch.plan().tensors;
  const auto bytes = [&](std::size_t i) { return patch.source_view().tensors()[planned[i].from].bytes(); };
  std::vector<std::size_t> out(planned.size());
  std::iota(out.begin(), out.end(), std::size_t{0});
  std::stable_sort(out.begin(), out.end(), [&](std::size_t a, std::size_t b) { return bytes(a) < bytes(b); });
  return out;
}

// Returns the number of a published version from "weight_v000002" at the end of a path; -1 if it names none.
Index version_in(const std::string& path) {
  const std::string last = base_name(path);
  std::string_view name = last;
  return take(name, "weight_v") ? parse_number(name).value_or(-1) : -1;
}

// Returns the version of a model: the one that SGLang says next to it, the last one that `reshard patch` applied, or
// that of its directory's name. 0, the model before all versions, if nothing tells.
Result<Index> version_of(Reader& model) {
  constexpr std::string_view kState = ".weight_sync/state.json";  // sglang/srt/weight_sync/disk_delta.py
  constexpr Index kMostBytes = 4096;
  const std::string path = path_join(model.catalog().root, std::string(kState));
  if (path_exists(path)) {
    const Json state = TRY(parse_json(TRY(read_whole_file(path, kMostBytes)), path));
    return parse_number(TRY(state.get_string("version").context(path))).value_or(0);
  }
  if (const auto recorded = recorded_merge(model))
    if (const Index applied = version_in(recorded->merge.sources.back().path); applied >= 0) return applied;
  return std::max<Index>(0, version_in(model.catalog().root));
}

}  // namespace

MergeOptions delta_options(const std::string& old_path, const std::string& new_path) {
  MergeOptions out;
  out.sources = {{std::string(kNew), new_path}, {std::string(kOld), old_path}};
  out.expression = xor_of({std::string(kNew), std::string(kOld)});
  return out;
}

MergeOptions patch_options(const std::string& base, const std::vector<std::string>& deltas) {
  MergeOptions out;
  out.applies_deltas = true;
  std::vector<std::string> names = {std::string(kDeltaBase)};
  out.sources.push_back({names.front(), base});
  for (const std::string& delta : deltas) {
    names.push_back("delta" + std::to_string(names.size()));
    out.sources.push_back({names.back(), delta});
  }
  out.expression = xor_of(names);
  return out;
}

Result<DeltaChain> DeltaChain::open(const MergeOptions& merge) {
  DeltaChain out;
  out.base_ = merge.sources.front().path;
  out.base_reader_ = merge.sources.front().reader;
  if (PublishedDelta::is_one(merge.sources[1].reader->catalog())) {
    TRY(out.add_published(merge));
    return out;
  }
  for (std::size_t s = 1; s < merge.sources.size(); ++s) {
    const std::string& path = merge.sources[s].path;
    const auto recorded = recorded_merge(*merge.sources[s].reader);
    if (!recorded && recorded.error().code() == ErrorCode::kCorrupt) return recorded.error();
    const Json* const tensors = recorded ? recorded->manifest.find("tensors") : nullptr;
    if (tensors == nullptr || recorded->merge.expression != delta_options("", "").expression)
      return unsupported(path + ": not a delta; deltas are written by 'reshard delta OLD NEW D'");
    out.links_.push_back({path, recorded->merge.sources.back().path, *tensors});
  }
  for (std::size_t k = 1; k < out.links_.size(); ++k) {
    const std::span<const Json::Member> before = TRY(out.links_[k - 1].tensors.as_object());
    for (const Json::Member& tensor : before) {
      const Json* const next = out.links_[k].tensors.find(tensor.key);
      if (next == nullptr || digest_of(&tensor.value, kNew) == digest_of(next, kOld)) continue;
      return usage_error(out.links_[k].path + ": made from another model than the result of " + out.links_[k - 1].path +
                         ": their digests of " + tensor_text(tensor.key) + " differ. It was made from " +
                         printable(out.links_[k].old_path) + "; give all deltas, in the order they were made");
    }
  }
  return out;
}

// Takes the deltas of a chain that trainers published.
Status DeltaChain::add_published(const MergeOptions& merge) {
  const PublishedDelta* before = nullptr;
  for (std::size_t s = 1; s < merge.sources.size(); ++s) {
    const MergeSource& source = merge.sources[s];
    const auto* const delta = dynamic_cast<const PublishedDelta*>(source.reader);
    if (!delta)
      return usage_error(source.path + ": not a published delta as " + merge.sources[1].path +
                         " is; apply one kind after the other");
    if (before && before->version() != delta->base_version())
      return usage_error(source.path + ": made from version " + printable(delta->base_version()) +
                         ", but follows version " + printable(before->version()) + "; give all deltas, in their order");
    if (!before) {
      const Index start = TRY(version_of(*base_reader_));
      if (parse_number(delta->base_version()) != start)
        return unsupported(source.path + ": made from version " + printable(delta->base_version()) + "; " + base_ +
                           " is version " + std::to_string(start) +
                           ": apply all versions between them, in their order");
    }
    published_.push_back(source.reader);
    before = delta;
  }
  return {};
}

Status DeltaChain::check_base(const std::string& tensor, const Digest& digest) const {
  const Link& first = links_.front();
  const std::string expected = digest_of(first.tensors.find(tensor), kOld);
  if (expected == digest.hex()) return {};
  return unsupported(base_ + ": not the model that " + first.path + " was made from, which was " +
                     printable(first.old_path) + ": " + tensor_text(tensor) + ": expected digest " +
                     printable(expected) + ", got " + digest.hex());
}

Status DeltaChain::check_start(const Conversion& patch, const ConversionSource& source, RunOptions run) const {
  if (!published_.empty()) return check_published(*base_reader_, published_, run);
  constexpr Index kMostBytes = Index{16} << 20;
  std::vector<std::size_t> chosen;
  std::vector<DigestRequest> requests;
  Index bytes = 0;
  for (const std::size_t i : smallest_first(patch)) {
    const std::size_t from = patch.plan().tensors[i].from;
    const Tensor& stored = patch.merge()->stored.tensors()[from];
    if ((bytes += stored.bytes()) > kMostBytes) break;
    chosen.push_back(i);
    requests.push_back({from, stored.dtype});
  }
  if (requests.empty()) return {};
  run.progress = nullptr;
  const auto proofs = TRY(digest_tensors(requests, *source.merged().front(), run));
  for (std::size_t k = 0; k < chosen.size(); ++k)
    TRY(check_base(patch.target_view().tensors()[patch.plan().tensors[chosen[k]].to].name, proofs[k].source));
  return {};
}

Status DeltaChain::check(const Conversion& patch, const std::vector<TensorProof>& proofs,
                         const MergeDigests& read) const {
  if (links_.empty()) return {};  // check_start() has proven the result of published deltas
  for (std::size_t i = 0; i < proofs.size(); ++i) {
    const PlannedTensor& planned = patch.plan().tensors[i];
    const Tensor& made = patch.target_view().tensors()[planned.to];
    const std::vector<Digest>& digests = read.of(planned.from);
    TRY(check_base(made.name, digests.front()));
    for (std::size_t k = 0; k < links_.size(); ++k) {
      const std::string expected = recorded_digest(links_[k].tensors.find(made.name));
      if (expected != digests[k + 1].hex())
        return corrupt(links_[k].path + ": " + tensor_text(made.name) + ": expected digest " + printable(expected) +
                       ", got " + digests[k + 1].hex() + ": the delta was damaged or changed; make or copy it again");
    }
    if (made.dtype != patch.merge()->stored.tensors()[planned.from].dtype) continue;  // of another dtype than NEW
    const std::string expected = digest_of(links_.back().tensors.find(made.name), kNew);
    if (expected != proofs[i].target.hex())
      return corrupt(links_.back().path + ": " + tensor_text(made.name) + ": expected digest " + printable(expected) +
                     " of the new model, got " + proofs[i].target.hex());
  }
  return {};
}

}  // namespace reshard

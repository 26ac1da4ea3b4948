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
  if (TRY(path_exists(path))) {
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
  for (std::size_t s = 1; s < merge.sources.size(); ++s) {
    if (dynamic_cast<const PublishedDelta*>(merge.sources[s].reader))
      TRY(out.add_published(merge, s));
    else
      TRY(out.add_link(merge, s));
    out.deltas_.push_back(merge.sources[s].reader);
  }
  return out;
}

Status DeltaChain::add_link(const MergeOptions& merge, std::size_t s) {
  const std::string& path = merge.sources[s].path;
  const auto recorded = recorded_merge(*merge.sources[s].reader);
  if (!recorded && recorded.error().code() == ErrorCode::kCorrupt) return recorded.error();
  const Json* const tensors = recorded ? recorded->manifest.find("tensors") : nullptr;
  if (tensors == nullptr || recorded->merge.expression != delta_options("", "").expression)
    return unsupported(
        path + ": not a delta; deltas are written by 'reshard delta OLD NEW D'. A whole model can only be the " +
        "first: apply the deltas after it to it");
  const Link link{s, path, recorded->merge.sources.back().path, recorded->merge.sources.front().path, *tensors};
  if (!links_.empty() && links_.back().source + 1 == s)
    for (const Json::Member& tensor : TRY(links_.back().tensors.as_object())) {
      const Json* const next = link.tensors.find(tensor.key);
      if (next == nullptr || digest_of(&tensor.value, kNew) == digest_of(next, kOld)) continue;
      return usage_error(path + ": made from another model than the result of " + links_.back().path +
                         ": their digests of " + tensor_text(tensor.key) + " differ. It was made from " +
                         printable(link.old_path) + "; give all deltas, in the order they were made");
    }
  links_.push_back(link);
  return {};
}

Status DeltaChain::add_published(const MergeOptions& merge, std::size_t s) {
  const std::string& path = merge.sources[s].path;
  const auto& delta = dynamic_cast<const PublishedDelta&>(*merge.sources[s].reader);
  is_published_ = true;
  const MergeSource& before = merge.sources[s - 1];
  if (const auto* const published = dynamic_cast<const PublishedDelta*>(before.reader)) {
    if (published->version() == delta.base_version()) return {};
    return usage_error(path + ": made from version " + printable(delta.base_version()) + ", but follows version " +
                       printable(published->version()) + "; give all deltas, in their order");
  }
  // Its checksums are of the tensors that it changes, so the others are proven by the version alone.
  const bool is_first = s == 1;
  const Index start = is_first ? TRY(version_of(*base_reader_)) : version_in(links_.back().new_path);
  if (parse_number(delta.base_version()) == start) return {};
  const std::string made = path + ": made from version " + printable(delta.base_version()) + "; ";
  if (is_first)
    return unsupported(made + base_ + " is version " + std::to_string(start) +
                       ": apply all versions between them, in their order");
  return unsupported(made + before.path + " gives " + printable(links_.back().new_path) +
                     ", whose name is not that of this version (weight_v" + printable(delta.base_version()) +
                     "): apply the deltas up to it first, to a directory of that name");
}

// Returns whether a published delta after the last of the others changes a tensor.
bool DeltaChain::is_changed_later(const std::string& tensor) const {
  for (std::size_t k = links_.back().source; k < deltas_.size(); ++k)  // deltas_[k] is source k + 1
    if (!dynamic_cast<const PublishedDelta&>(*deltas_[k]).checksum(tensor).empty()) return true;
  return false;
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
  if (is_published_ && !links_.empty()) TRY(check_dtypes(patch));
  if (is_published_) TRY(check_published(*base_reader_, deltas_, run));
  if (links_.empty() || links_.front().source > 1) return {};
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

// Fails (unsupported) if a tensor's dtype changes: then its digest does not prove a mixed chain.
Status DeltaChain::check_dtypes(const Conversion& patch) const {
  for (const PlannedTensor& planned : patch.plan().tensors)
    if (const Tensor& made = patch.target_view().tensors()[planned.to];
        made.dtype != patch.merge()->stored.tensors()[planned.from].dtype)
      return unsupported(tensor_text(made.name) + ": changes its dtype, which cannot be combined with deltas of both " +
                         "kinds: patch first, then convert");
  return {};
}

Status DeltaChain::check(const Conversion& patch, const std::vector<TensorProof>& proofs,
                         const MergeDigests& read) const {
  if (links_.empty()) return {};  // check_start() has proven the result of published deltas
  for (std::size_t i = 0; i < proofs.size(); ++i) {
    const PlannedTensor& planned = patch.plan().tensors[i];
    const Tensor& made = patch.target_view().tensors()[planned.to];
    const std::vector<Digest>& digests = read.of(planned.from);
    if (links_.front().source == 1) TRY(check_base(made.name, digests.front()));
    for (const Link& link : links_) {
      const std::string expected = recorded_digest(link.tensors.find(made.name));
      if (const std::string got = digests[link.source].hex(); expected != got)
        return corrupt(link.path + ": " + tensor_text(made.name) + ": expected digest " + printable(expected) +
                       ", got " + got + ": the delta was damaged or changed; make or copy it again");
    }
    const Tensor& stored = patch.merge()->stored.tensors()[planned.from];
    if (made.dtype != stored.dtype) continue;  // of another dtype than NEW
    if (is_changed_later(stored.name)) continue;
    const std::string expected = digest_of(links_.back().tensors.find(made.name), kNew);
    if (expected != proofs[i].target.hex())
      return corrupt(links_.back().path + ": " + tensor_text(made.name) + ": expected digest " + printable(expected) +
                     " of the new model, got " + proofs[i].target.hex() +
                     (is_published_ ? ": a delta before it is not of the model that it was made from" : ""));
  }
  return {};
}

}  // namespace reshard

// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/delta_chain.h"

#include <algorithm>
#include <numeric>

#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"

namespace reshard {
namespace {

constexpr std::string_view kNew = "new", kOld = "old";

// Returns digest `source` of "merged_digests", or an empty text if there is none.
std::string recorded_digest(const Json& tensor, std::size_t source) {
  const Json* const digests = tensor.find("merged_digests");
  const auto items = digests ? digests->as_array() : Result<std::span<const Json>>(corrupt("none"));
  if (!items || source >= items->size()) return "";
  const auto text = (*items)[source].as_string();
  return text ? std::string(*text) : "";
}
std::string digest_of_new(const Json& tensor) { return recorded_digest(tensor, 0); }
std::string digest_of_old(const Json& tensor) { return recorded_digest(tensor, 1); }

std::string digest_of_delta(const Json& tensor) {
  const auto text = tensor.get_string("digest");
  return text ? std::string(*text) : "";
}

// Returns the recorded path of the old model if the manifest is that of a delta.
Result<std::string> recorded_old(const Json& manifest) {
  const Json* const merge = manifest.find("merge");
  if (merge == nullptr || TRY(merge->get_string("expression")) != xor_of({std::string(kNew), std::string(kOld)}))
    return corrupt("records no delta");
  const Json* const sources = merge->find("sources");
  if (sources == nullptr) return corrupt("records no sources");
  const std::span<const Json> items = TRY(sources->as_array());
  if (items.size() != 2) return corrupt("records another number of sources than 2");
  return std::string(TRY(items[1].get_string("path")));
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
  std::vector<std::string> names = {"base"};
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
  for (std::size_t s = 1; s < merge.sources.size(); ++s) {
    const std::string& path = merge.sources[s].path;
    const auto text = TRY(merge.sources[s].reader->side_file(std::string(kManifestFile), kMaxManifestBytes));
    if (!text) return unsupported(path + ": not a delta: it has no " + std::string(kManifestFile));
    const Json manifest = TRY(parse_json(*text, path));
    const auto old_path = recorded_old(manifest);
    const Json* const tensors = manifest.find("tensors");
    if (!old_path || tensors == nullptr)
      return unsupported(path + ": not a delta: its " + std::string(kManifestFile) + " " +
                         (old_path ? "records no tensors" : old_path.error().message()) +
                         "; deltas are written by 'reshard delta OLD NEW D'");
    out.links_.push_back({path, *old_path, *tensors});
  }
  for (std::size_t k = 1; k < out.links_.size(); ++k) {
    const std::span<const Json::Member> before = TRY(out.links_[k - 1].tensors.as_object());
    for (const Json::Member& tensor : before) {
      const Json* const next = out.links_[k].tensors.find(tensor.key);
      if (next == nullptr || digest_of_new(tensor.value) == digest_of_old(*next)) continue;
      return usage_error(out.links_[k].path + ": made from another model than the result of " + out.links_[k - 1].path +
                         ": their digests of " + tensor_text(tensor.key) + " differ. It was made from " +
                         printable(out.links_[k].old_path) + "; give all deltas, in the order they were made");
    }
  }
  return out;
}

const Json* DeltaChain::record(const Link& link, const std::string& tensor) const { return link.tensors.find(tensor); }

Status DeltaChain::check_base(const std::string& tensor, const Digest& digest) const {
  const Link& first = links_.front();
  const Json* const recorded = record(first, tensor);
  const std::string expected = recorded ? digest_of_old(*recorded) : "none";
  if (expected == digest.hex()) return {};
  return unsupported(base_ + ": not the model that " + first.path + " was made from, which was " +
                     printable(first.old_path) + ": " + tensor_text(tensor) + ": expected digest " +
                     printable(expected) + ", got " + digest.hex());
}

Status DeltaChain::check_start(const Conversion& patch, const ConversionSource& source, RunOptions run) const {
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
  for (std::size_t i = 0; i < proofs.size(); ++i) {
    const PlannedTensor& planned = patch.plan().tensors[i];
    const Tensor& made = patch.target_view().tensors()[planned.to];
    const std::vector<Digest>& digests = read.of(planned.from);
    TRY(check_base(made.name, digests.front()));
    for (std::size_t k = 0; k < links_.size(); ++k) {
      const Json* const recorded = record(links_[k], made.name);
      const std::string expected = recorded ? digest_of_delta(*recorded) : "none";
      if (expected != digests[k + 1].hex())
        return corrupt(links_[k].path + ": " + tensor_text(made.name) + ": expected digest " + printable(expected) +
                       ", got " + digests[k + 1].hex() + ": the delta was damaged or changed; make or copy it again");
    }
    if (made.dtype != patch.merge()->stored.tensors()[planned.from].dtype) continue;  // of another dtype than NEW
    const Json* const last = record(links_.back(), made.name);
    if (const std::string expected = last ? digest_of_new(*last) : "none"; expected != proofs[i].target.hex())
      return corrupt(links_.back().path + ": " + tensor_text(made.name) + ": expected digest " + printable(expected) +
                     " of the new model, got " + proofs[i].target.hex());
  }
  return {};
}

}  // namespace reshard

// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/source_manifest.h"

#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/model/view.h"
#include "lib/source/tensor_source.h"

namespace reshard {
namespace {

bool has_checksums(const Tensor& tensor) {
  for (std::size_t i = 0; i < tensor.fragments.size(); ++i)
    if (!tensor.fragments.get(i).crc) return false;
  return true;
}

bool is_stored_only_in(const Tensor& tensor, const std::set<std::uint32_t>& files) {
  for (std::size_t i = 0; i < tensor.fragments.size(); ++i)
    if (!files.contains(tensor.fragments.extent(i).file)) return false;
  return !tensor.fragments.empty();
}

}  // namespace

Result<std::optional<SourceManifest>> SourceManifest::open(Reader& source, const Plan& plan, const Catalog& view,
                                                           Families families) {
  if (std::all_of(plan.tensors.begin(), plan.tensors.end(),
                  [&](const auto& t) { return has_checksums(view.tensors()[t.from]); }))
    return std::optional<SourceManifest>();
  const auto text = TRY(source.side_file(std::string(kManifestFile), kMaxManifestBytes));
  if (!text) return std::optional<SourceManifest>();
  std::string path = path_join(source.catalog().root, kManifestFile);
  Json manifest = TRY(parse_json(*text, path));
  const Json* const recorded = manifest.find("tensors");
  if (!recorded || !recorded->is_object()) return corrupt(path + ": expected an object 'tensors'");
  const std::span<const Json::Member> tensors = *recorded->as_object();
  for (const Json::Member& member : tensors)
    TRY(member.value.get_string("digest").context(path + ": " + tensor_text(member.key)));
  TRY(recorded_family(manifest, families).context(path));
  return std::optional(SourceManifest(source, std::move(path), std::move(manifest), plan, view, families));
}

Result<Index> SourceManifest::check(const std::vector<TensorProof>& proofs, const Model& model,
                                    RunOptions options) const {
  const Json& recorded = *manifest_.find("tensors");
  const std::set<std::uint32_t> files = TRY(unchanged_files());
  std::unordered_map<std::string_view, std::size_t> by_name;  // of the plan's tensors
  std::set<std::pair<std::uint32_t, Index>> places;           // where they are stored: file, offset
  for (std::size_t k = 0; k < plan_->tensors.size(); ++k) {
    const Tensor& tensor = planned(k);
    by_name.emplace(tensor.name, k);
    for (std::size_t i = 0; i < tensor.fragments.size(); ++i)
      places.emplace(tensor.fragments.extent(i).file, tensor.fragments.extent(i).offset);
  }
  const auto was_read = [&](const Tensor& tensor) {
    for (std::size_t i = 0; i < tensor.fragments.size(); ++i)
      if (places.contains({tensor.fragments.extent(i).file, tensor.fragments.extent(i).offset})) return true;
    return false;
  };

  const Catalog view =
      TRY(recorded_view(manifest_, source_->catalog(), model.config_or_null(), families_).context(path_));
  Index held = 0;
  std::vector<DigestRequest> again;
  for (std::size_t i = 0; i < view.tensors().size(); ++i) {
    const Tensor& tensor = view.tensors()[i];
    if (!recorded.find(tensor.name) || has_checksums(tensor) || !is_stored_only_in(tensor, files)) continue;
    const auto same = by_name.find(tensor.name);
    if (same != by_name.end() && is_same_data(planned(same->second), tensor)) {
      TRY(compare(tensor, proofs[same->second].source));
      ++held;
    } else if (was_read(tensor)) {
      again.push_back({i, tensor.dtype});
    }
  }
  if (again.empty()) return held;
  options.progress = nullptr;
  FileSource source(view, source_->files());
  const auto digests = TRY(digest_tensors(again, source, options));
  for (std::size_t k = 0; k < again.size(); ++k) TRY(compare(view.tensors()[again[k].tensor], digests[k].source));
  return held + std::ssize(again);
}

// Returns the files whose length is the recorded one. A checkpoint that is one file records none.
Result<std::set<std::uint32_t>> SourceManifest::unchanged_files() const {
  const Json* const recorded = manifest_.find("files");
  const auto& files = source_->catalog().files;
  std::set<std::uint32_t> out;
  for (std::uint32_t f = 0; f < files.size(); ++f) {
    const Json* const size = recorded ? recorded->find(files[f].path) : nullptr;
    if (!recorded || (size && TRY(size->as_index().context(path_)) == files[f].size)) out.insert(f);
  }
  return out;
}

Status SourceManifest::compare(const Tensor& tensor, const Digest& digest) const {
  const Json& recorded = *manifest_.find("tensors")->find(tensor.name);
  const std::string_view expected = TRY(recorded.get_string("digest").context(path_));
  if (expected == digest.hex()) return {};
  return corrupt(
      source_->catalog().file_path(tensor.fragments.extent(0).file) + ": " + tensor_text(tensor.name) + ": " + path_ +
      " records digest " + printable(expected) + ", got " + digest.hex() +
      ": the tensor was damaged or changed after reshard wrote it. Restore it from another copy; if it was " +
      "changed on purpose, remove that manifest");
}

}  // namespace reshard

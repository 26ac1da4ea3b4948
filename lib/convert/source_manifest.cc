#include "lib/convert/source_manifest.h"

#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/engine/tensor_source.h"
#include "lib/model/view.h"

namespace reshard {
namespace {

bool has_checksums(const Tensor& tensor) {
  for (std::size_t i = 0; i < tensor.fragments.size(); ++i)
    if (!tensor.fragments.get(i).crc) return false;
  return true;
}

class SourceManifest {
 public:
  SourceManifest(Reader& source, std::string path, const Json& manifest, const ReadTensors& read)
      : catalog_(source.catalog()), source_(source), path_(std::move(path)), manifest_(manifest), read_(read) {}

  Result<Index> check(const Model& model, RunOptions options) {
    const Json* const recorded = manifest_.find("tensors");
    if (!recorded || !recorded->is_object()) return corrupt(path_ + ": expected an object 'tensors'");
    recorded_ = recorded;
    TRY(find_files());
    find_read();
    const Catalog view = TRY(recorded_view(manifest_, catalog_, model.config_or_null()).context(path_));
    std::vector<DigestRequest> again;
    for (std::size_t i = 0; i < view.tensors().size(); ++i) {
      const Tensor& tensor = view.tensors()[i];
      if (!recorded_->find(tensor.name) || !is_guarded(tensor)) continue;
      const auto same = by_name_.find(tensor.name);
      if (same != by_name_.end() && is_same_data(planned(same->second), tensor)) {
        TRY(compare(tensor, read_.proofs[same->second].source));
      } else if (was_read(tensor)) {
        again.push_back({i, tensor.dtype});
      }
    }
    if (again.empty()) return held_;
    options.progress = nullptr;
    FileSource files(view, source_.files());
    const auto proofs = TRY(digest_tensors(again, files, options));
    for (std::size_t k = 0; k < again.size(); ++k) TRY(compare(view.tensors()[again[k].tensor], proofs[k].source));
    return held_;
  }

 private:
  const Tensor& planned(std::size_t k) const { return read_.view.tensors()[read_.plan.tensors[k].from]; }

  // The files that are still as long as they were; a checkpoint that is one file records none.
  Status find_files() {
    const Json* const files = manifest_.find("files");
    for (std::uint32_t f = 0; f < catalog_.files.size(); ++f) {
      const Json* const size = files ? files->find(catalog_.files[f].path) : nullptr;
      if (!files || (size && TRY(size->as_index().context(path_)) == catalog_.files[f].size)) files_.insert(f);
    }
    return {};
  }

  void find_read() {
    for (std::size_t k = 0; k < read_.plan.tensors.size(); ++k) {
      const Tensor& tensor = planned(k);
      by_name_.emplace(tensor.name, k);
      for (std::size_t i = 0; i < tensor.fragments.size(); ++i) {
        const Extent extent = tensor.fragments.extent(i);
        extents_.emplace(extent.file, extent.offset);
      }
    }
  }

  // By the manifest alone.
  bool is_guarded(const Tensor& tensor) const {
    if (tensor.fragments.empty() || has_checksums(tensor)) return false;
    for (std::size_t i = 0; i < tensor.fragments.size(); ++i)
      if (!files_.contains(tensor.fragments.extent(i).file)) return false;
    return true;
  }

  bool was_read(const Tensor& tensor) const {
    for (std::size_t i = 0; i < tensor.fragments.size(); ++i)
      if (extents_.contains({tensor.fragments.extent(i).file, tensor.fragments.extent(i).offset})) return true;
    return false;
  }

  Status compare(const Tensor& tensor, const Digest& digest) {
    const std::string_view expected = TRY(recorded_->find(tensor.name)->get_string("digest").context(path_));
    if (expected == digest.hex()) {
      ++held_;
      return {};
    }
    return corrupt(catalog_.file_path(tensor.fragments.extent(0).file) + ": " + tensor_text(tensor.name) +
                   ": expected digest " + printable(expected) + " as " + path_ + " records, got " + digest.hex() +
                   ": it was damaged, or changed, since reshard wrote it. Take it from another copy; where it was " +
                   "changed on purpose, remove that manifest");
  }

  const Catalog& catalog_;
  Reader& source_;
  const std::string path_;
  const Json& manifest_;
  const Json* recorded_ = nullptr;
  const ReadTensors& read_;
  std::set<std::uint32_t> files_;
  std::unordered_map<std::string_view, std::size_t> by_name_;  // of the plan's tensors
  std::set<std::pair<std::uint32_t, Index>> extents_;          // that they lie in: file, offset
  Index held_ = 0;
};

}  // namespace

Result<Index> check_source_manifest(Reader& source, const Model& model, const ReadTensors& read,
                                    const RunOptions& options) {
  const auto& planned = read.plan.tensors;
  if (std::all_of(planned.begin(), planned.end(),
                  [&](const auto& t) { return has_checksums(read.view.tensors()[t.from]); }))
    return Index{0};
  const auto text = TRY(source.side_file(std::string(kManifestFile), kMaxManifestBytes));
  if (!text) return Index{0};
  const std::string path = path_join(source.catalog().root, kManifestFile);
  const Json manifest = TRY(parse_json(*text, path));
  return SourceManifest(source, path, manifest, read).check(model, options);
}

}  // namespace reshard

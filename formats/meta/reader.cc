// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <map>

#include "formats/meta/meta.h"
#include "formats/tensor_files/indexed_files.h"
#include "formats/tensor_files/joined_tensor.h"
#include "formats/tensor_files/rank_parts.h"
#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard::meta {
namespace {

constexpr Index kMaxParamsBytes = Index{1} << 20;
constexpr int kWhole = -1;
constexpr int kEmbedding = -2;  // cut by rows or by columns
constexpr std::string_view kNorm = "norm.weight";

// Returns the dimension that model parallelism cuts, or nothing for names that are not Llama's.
std::optional<int> cut_of(std::string_view name) {
  static constexpr std::pair<std::string_view, int> kCuts[] = {
      {"attention.wq.weight", 0},    {"attention.wk.weight", 0},
      {"attention.wv.weight", 0},    {"attention.wo.weight", 1},
      {"feed_forward.w1.weight", 0}, {"feed_forward.w2.weight", 1},
      {"feed_forward.w3.weight", 0}, {"attention_norm.weight", kWhole},
      {"ffn_norm.weight", kWhole},   {"norm.weight", kWhole},
      {"output.weight", 0},          {"tok_embeddings.weight", kEmbedding},
      {"rope.freqs", kWhole},
  };
  for (const auto& [known, dim] : kCuts)
    if (name == known || (name.ends_with(known) && name[name.size() - known.size() - 1] == '.')) return dim;
  return std::nullopt;
}

class MetaReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);

 private:
  Result<std::optional<Json>> made_config() override;

  Status open_ranks(const PathSnapshot& directory, const OpenOptions& options);
  Status open_safetensors(const PathSnapshot& directory, const std::string& only, const OpenOptions& options);
  Status read_params(const PathSnapshot& directory);
  Status join(const RankParts::Parts& all);
  Result<int> cut_of_embedding(const StoredTensor& stored) const;
  Status check_count() const;

  std::optional<Json> params_;
  RankParts parts_;
  Index ranks_ = 0;  // that have files
};

Status MetaReader::read_params(const PathSnapshot& directory) {
  if (!directory.has_file(kParamsFile)) return {};
  const std::string path = path_join(catalog_.root, kParamsFile);
  catalog_.metadata_files.emplace_back(kParamsFile);
  params_ = TRY(parse_json(TRY(read_whole_file(path, kMaxParamsBytes)), path));
  return {};
}

// ---- one file for each rank

Result<int> MetaReader::cut_of_embedding(const StoredTensor& stored) const {
  const RankParts::Parts* const norm = parts_.find(kNorm);
  const Dims& shape = stored.shape();
  if (norm == nullptr || norm->first().stored.shape().rank() != 1 || shape.rank() != 2)
    return corrupt("expected a matrix, and next to it a '" + std::string(kNorm) + "', which shows how it is cut");
  const Index width = norm->first().stored.shape()[0];
  if (shape[1] == width) return 0;
  const auto columns = checked_mul(shape[1], ranks_);
  if (columns && *columns == width) return 1;
  return corrupt("expected rows of " + count_of(width, "column") + ", or " + std::to_string(width) + "/" +
                 count_of(ranks_, "column") + ", got shape " + to_string(shape));
}

// Joins the parts of all ranks along the dimension that is cut.
Status MetaReader::join(const RankParts::Parts& all) {
  const auto& [name, parts] = all;
  const StoredTensor& first = parts.front().stored;
  const std::string what = catalog_.root + ": " + tensor_text(name);
  if (std::ssize(parts) != ranks_ && !is_partial()) {
    Index without = 0;
    while (all.of(without) != nullptr) ++without;
    return corrupt(catalog_.file_path(static_cast<std::uint32_t>(without)) + ": expected " + tensor_text(name) +
                   ", as " + catalog_.files[first.extent.file].path + " has it; it is missing");
  }
  int dim = kWhole;
  if (ranks_ > 1) {
    const auto cut = cut_of(name);
    if (!cut)
      return unsupported(what + ": is in the files of " + count_of(ranks_, "rank") +
                         ", and is not a tensor of Llama: reshard does not know how its parts join");
    dim = *cut == kEmbedding ? TRY(cut_of_embedding(first).context(what)) : *cut;
  }
  if (dim >= first.shape().rank())
    return corrupt(what + ": expected " + count_of(dim + 1, "dimension") + " or more, got shape " +
                   to_string(first.shape()));
  Dims shape = first.shape();
  std::vector<Index> begins = {0};  // of each rank's part
  for (Index rank = 0; rank < (dim < 0 ? 0 : ranks_); ++rank) {
    const RankPart* const part = all.of(rank);  // null: its file cannot be read; the part is as long as the first
    const Index length = part && part->stored.shape().rank() > dim ? part->stored.shape()[dim] : first.shape()[dim];
    const auto end = checked_add(begins.back(), length);
    if (!end) return corrupt(what + ": the sum of its parts overflows");
    begins.push_back(*end);
  }
  if (dim >= 0) shape[dim] = begins.back();
  for (const RankPart& part : parts) {
    const StoredTensor& stored = part.stored;
    Dims same = stored.shape();
    if (dim >= 0 && same.rank() == shape.rank()) same[dim] = first.shape()[dim];
    if (stored.dtype != first.dtype || same != first.shape())
      return corrupt(catalog_.file_path(stored.extent.file) + ": " + tensor_text(name) + ": expected " +
                     type_text(first) + " as in " + catalog_.files[first.extent.file].path + ", got " +
                     type_text(stored));
  }
  TRY(check_size(first.dtype, shape).context(what));
  JoinedTensor joined(name, first.dtype, shape, {name});
  for (const RankPart& part : parts) {
    LocalBox place{whole(part.stored.shape()), Dims::filled(shape.rank(), 0)};
    if (dim >= 0) place.box.origin[dim] = begins[part.rank];
    joined.add(part.stored, place);
  }
  return catalog_.add(std::move(joined.tensor));
}

// Fails if the last files are missing. Only a matrix that is cut by columns shows this, as its whole width is known.
Status MetaReader::check_count() const {
  const auto norm = catalog_.find(kNorm), matrix = catalog_.find("layers.0.attention.wo.weight");
  if (!norm || !matrix || (params_ && params_->contains("head_dim"))) return {};
  const Dims &vector = catalog_.tensors()[*norm].shape, &shape = catalog_.tensors()[*matrix].shape;
  if (vector.rank() != 1 || shape.rank() != 2 || shape[1] >= vector[0]) return {};
  const Index files = std::ssize(catalog_.files), width = shape[1] / files;
  const std::string wanted = width > 0 && vector[0] % width == 0 ? std::to_string(vector[0] / width) : "more";
  return io_error(catalog_.root + ": expected the files of " + wanted + " ranks, as 'attention.wo' should have " +
                  count_of(vector[0], "column") + "; got " + count_of(files, "file") + " with " +
                  std::to_string(shape[1]));
}

Status MetaReader::open_ranks(const PathSnapshot& directory, const OpenOptions& options) {
  std::map<Index, std::string> files;
  for (const DirectoryEntry& e : directory.entries())
    if (const auto rank = e.is_directory ? std::nullopt : rank_of_file(e.name))
      if (!files.emplace(*rank, e.name).second)
        return unsupported(catalog_.root + ": '" + printable(e.name) + "' and '" + printable(files[*rank]) +
                           "' are both files of rank " + std::to_string(*rank));
  TRY(check_no_gap(files).context(catalog_.root));
  for (const auto& [rank, name] : files) {
    const auto open = TRY(open_if_whole(name, options));
    if (!open) continue;
    const bool is_first = catalog_.files.size() == 1;
    catalog_.files[open->file].writer = rank;
    for (const TensorFile::Entry& e : open->content->tensors())
      parts_.add(e.name, rank, in_file(e.tensor, open->file), e.tensor.dtype);
    if (!is_first) continue;  // all ranks have the same objects
    for (const TensorFile::Object& o : open->content->objects()) TRY(add_object(o.name, o.path, open->file, o.value));
  }
  ranks_ = std::ssize(files);
  if (parts_.all().empty()) return corrupt(catalog_.root + ": the files of the ranks hold no tensors");
  for (const RankParts::Parts& parts : parts_.all()) TRY(join(parts));
  return check_count();
}

// ---- whole tensors

Status MetaReader::open_safetensors(const PathSnapshot& directory, const std::string& only,
                                    const OpenOptions& options) {
  constexpr std::string_view kIndex = "consolidated.safetensors.index.json";
  std::vector<std::string> names;
  std::optional<IndexedFiles> index;
  if (!only.empty()) {
    names = {only};
  } else if (directory.has_file(kIndex)) {
    index = TRY(IndexedFiles::open(catalog_.root, std::string(kIndex)));
    names = index->files();
  } else {
    for (const DirectoryEntry& e : directory.entries())
      if (!e.is_directory && is_safetensors_name(e.name)) names.push_back(e.name);
    if (names.size() != 1)
      return io_error(catalog_.root + ": expected one consolidated.safetensors, or " + std::string(kIndex) +
                      ", which names the files that belong together; got " + names_text(names, "file"));
  }
  for (const std::string& name : names) {
    const auto open = TRY(open_if_whole(name, options));
    if (!open) {
      catalog_.unread_files.back().tensors = IndexedFiles::leave_out(index, name);
      continue;
    }
    for (const TensorFile::Entry& e : open->content->tensors())
      if (!index || index->is_wanted(e.name, name)) TRY(add_tensor(e.name, e.path, open->file, e.tensor));
    for (const TensorFile::Object& o : open->content->objects()) TRY(add_object(o.name, o.path, open->file, o.value));
  }
  return index ? check_index(*index, {}) : Status();
}

// ---- the whole

Status MetaReader::open(const PathSnapshot& place, const OpenOptions& options) {
  const PathSnapshot& directory = *TRY(place.directory());
  catalog_.root = directory.path();
  const auto is_of_rank = [](std::string_view name) { return rank_of_file(name).has_value(); };
  const std::string only = place.is_directory() ? std::string() : place.name();
  const bool has_ranks = only.empty() ? directory.has_file_like(is_of_rank) : is_of_rank(only);
  TRY(read_params(directory));
  TRY(has_ranks ? open_ranks(directory, options)
                : open_safetensors(directory, is_safetensors_name(only) ? only : "", options));
  catalog_.attributes.emplace_back(
      "format", has_ranks ? "Meta consolidated, files of " + count_of(std::ssize(catalog_.files), "rank")
                          : "Mistral consolidated, " + count_of(std::ssize(catalog_.files), "file"));
  if (params_) {
    const std::string part = unknown_part(*params_);
    catalog_.attributes.emplace_back(
        "config", part.empty() ? "made from params.json"
                               : "none: params.json describes '" + part + "', from which no config.json can be made");
  }
  return finish(options);
}

Result<std::optional<Json>> MetaReader::made_config() {
  if (!params_ || !unknown_part(*params_).empty()) return std::optional<Json>();
  return std::optional(TRY(make_config(*params_, catalog_, path_join(catalog_.root, kParamsFile))));
}

}  // namespace

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<MetaReader>(place, options);
}

}  // namespace reshard::meta

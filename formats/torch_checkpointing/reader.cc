// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "formats/tensor_files/joined_tensor.h"
#include "formats/tensor_files/rank_values.h"
#include "formats/torch_checkpointing/metadata.h"
#include "formats/torch_checkpointing/torch_checkpointing.h"
#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard::torch_checkpointing {
namespace {

constexpr Index kMaxMetadataBytes = (Index{1} << 30) - 1;

// Returns the name of an item's value.
std::string name_in(const std::string& item, const std::string& name) {
  return item == kModelItem ? name : item + "." + name;
}

// Describes the gaps of an unfinished save: per-rank files that are empty or missing.
Result<std::string> gaps_of(const std::vector<DirectoryEntry>& entries, const std::string& directory) {
  std::map<std::string, std::set<Index>> ranks;  // by item and extension
  std::set<Index> all;
  std::vector<std::string> empty, missing;
  bool has_metadata = false;
  for (const DirectoryEntry& e : entries) {
    has_metadata = has_metadata || e.name == kMetadataFile;
    const auto file = e.is_directory ? std::nullopt : parse_rank_file(e.name);
    if (!file) continue;
    ranks[file->item + "_*" + file->extension].insert(file->rank);
    all.insert(file->rank);
    const auto node = TRY(node_at(path_join(directory, e.name)));
    if (node && node->size == 0) empty.push_back(e.name);
  }
  if (!has_metadata) missing.emplace_back(kMetadataFile);
  for (const auto& [pattern, of_item] : ranks)
    for (const Index rank : all)
      if (!of_item.contains(rank)) {
        std::string name = pattern;
        missing.push_back(name.replace(name.find('*'), 1, std::to_string(rank)));
      }
  std::string out;
  if (!missing.empty()) out += "; missing: " + names_text(missing, "file");
  if (!empty.empty()) out += "; empty, as after a failed write: " + names_text(empty, "file");
  return out;
}

class StepReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);

 private:
  // An item's file of one rank.
  struct Content {
    std::optional<std::uint32_t> file;  // nothing: it cannot be read
    std::unordered_map<std::string_view, const TensorFile::Entry*> tensors;
    std::set<std::string_view> used;
  };

  static Status check_finished(const PathSnapshot& directory);
  Result<Content> read_file(const std::string& item, const std::string& name, Index rank, const OpenOptions& options);
  Status read_item(const std::string& name, const Item& item, const OpenOptions& options);
  Status join(const std::string& item, const ItemTensor& tensor, std::vector<Content>& contents);
  Result<std::size_t> add_holding(const StoredPlacement& holding, const ItemTensor& tensor,
                                  std::vector<Content>& contents, JoinedTensor& joined);
  Status read_others(const PathSnapshot& directory, const OpenOptions& options);
  Status add_own_tensors(const std::string& item, const std::vector<Content>& contents);
  void add_values(const std::string& item, const TensorFile& content, std::uint32_t file);
  Status finish_values();
  void describe_format();

  Metadata metadata_;
  std::set<std::string> files_of_items_;
  std::map<std::pair<std::string, std::string>, RankValues> values_;  // by item and name
  std::set<std::string> left_out_, unknown_;
};

// Fails unless the save is finished: it has its final name and metadata.
Status StepReader::check_finished(const PathSnapshot& directory) {
  constexpr std::string_view kUnfinished = "tmp_";
  const std::string& path = directory.path();
  const std::string name = directory.name();
  if (name.starts_with(kUnfinished))
    return corrupt(path + ": a save that did not finish: torch_checkpointing renames it to '" +
                   printable(name.substr(kUnfinished.size())) + "' when every rank has written" +
                   TRY(gaps_of(directory.entries(), path)) + ". Take an earlier step");
  if (!directory.has_file(kMetadataFile))
    return corrupt(path + ": a save without " + std::string(kMetadataFile) +
                   ", which describes its tensors: it did not finish, or was not copied completely" +
                   TRY(gaps_of(directory.entries(), path)));
  return {};
}

Result<StepReader::Content> StepReader::read_file(const std::string& item, const std::string& name, Index rank,
                                                  const OpenOptions& options) {
  Content out;
  const auto open = TRY(open_if_whole(name, options, TensorFile::Parts::kRead));
  if (!open) return out;
  add_header_metadata(open->content->metadata());
  catalog_.files[open->file].writer = rank;
  out.file = open->file;
  for (const TensorFile::Entry& e : open->content->tensors()) out.tensors.emplace(e.name, &e);
  add_values(item, *open->content, open->file);
  return out;
}

// Adds the parts of a mesh's ranks and returns how many ranks have the tensor.
Result<std::size_t> StepReader::add_holding(const StoredPlacement& holding, const ItemTensor& tensor,
                                            std::vector<Content>& contents, JoinedTensor& joined) {
  const Mesh mesh = mesh_of_sizes(holding.mesh->sizes);
  const Placement placement =
      TRY(placement_of(holding.placements, holding.mesh->sizes, holding.shape.rank())
              .context(path_join(catalog_.root, kMetadataFile) + ": " + tensor_text(tensor.name)));
  std::size_t found = 0;
  for (std::size_t i = 0; i < holding.mesh->ranks.size(); ++i) {
    Content& content = contents[holding.mesh->ranks[i]];
    if (!content.file) continue;
    const std::string where = catalog_.file_path(*content.file) + ": " + tensor_text(tensor.name);
    const auto entry = content.tensors.find(tensor.name);
    if (entry == content.tensors.end()) {
      // The metadata list a plain tensor on every rank, but only the ranks of its stage have it.
      if (holding.is_replicated()) continue;
      return corrupt(where + ": expected it, as " + std::string(kMetadataFile) + " says; it is missing");
    }
    ++found;
    content.used.insert(entry->first);
    const Box box = owned_boxes(mesh, placement, holding.shape, i).front().box;
    const auto& distributed = entry->second->distributed;
    const StoredTensor* stored = &entry->second->tensor;
    if (distributed) {
      if (distributed->parts.size() > 1) return corrupt(where + ": expected one part of it, got several");
      if (distributed->parts.empty() && box.empty()) continue;
      stored = distributed->parts.empty() ? nullptr : &distributed->parts.front();
    }
    const bool fits = stored && stored->dtype == holding.dtype &&
                      (distributed ? distributed->shape == holding.shape && (stored->box == box || box.empty())
                                   : stored->shape() == box.shape || (volume(stored->shape()) == 0 && box.empty()));
    if (!fits)
      return corrupt(where + ": expected " + type_text(holding.dtype, box.shape) + ", which is " + to_string(box) +
                     " of " + to_string(holding.shape) + " as " + std::string(kMetadataFile) + " has it, got " +
                     (stored ? type_text(*stored) : std::string("nothing")));
    Fragment fragment = in_file(*stored, *content.file);
    fragment.box = box;
    joined.add(fragment);
  }
  return found;
}

Status StepReader::join(const std::string& item, const ItemTensor& tensor, std::vector<Content>& contents) {
  const StoredPlacement& first = tensor.holdings.front();
  const std::string name = name_in(item, tensor.name);
  JoinedTensor joined(name, first.dtype, first.shape, KeyPath{name});
  std::size_t found = 0;
  for (const StoredPlacement& holding : tensor.holdings) found += TRY(add_holding(holding, tensor, contents, joined));
  if (found == 0 && !is_partial())
    return corrupt(catalog_.root + ": " + tensor_text(name) + ": " + std::string(kMetadataFile) +
                   " lists it, but it is in no rank's file");
  return catalog_.add(std::move(joined.tensor));
}

Status StepReader::read_item(const std::string& name, const Item& item, const OpenOptions& options) {
  std::vector<Content> contents;
  for (std::size_t rank = 0; rank < item.files.size(); ++rank) {
    contents.push_back(TRY(read_file(name, item.files[rank], rank, options)));
    files_of_items_.insert(item.files[rank]);
  }
  for (const ItemTensor& tensor : item.tensors) TRY(join(name, tensor, contents));
  for (const Content& content : contents)
    for (const auto& [key, entry] : content.tensors)
      if (!content.used.contains(key)) unknown_.insert(name_in(name, std::string(key)));
  return {};
}

// ---- What metadata.pkl does not describe

void StepReader::add_values(const std::string& item, const TensorFile& content, std::uint32_t file) {
  for (const TensorFile::Object& o : content.objects())
    if (!values_[{item, o.name}].add(file, o.path, o.value)) left_out_.insert(name_in(item, o.name));
}

// Adds values: once if all ranks have the same, otherwise one for each rank.
Status StepReader::finish_values() {
  for (auto& [key, values] : values_) {
    const auto& [item, own] = key;
    if (values.is_alike()) {
      const std::string name = name_in(item, own);
      TRY(add_pickled(name, {name}, values.holders.front().first, std::move(values.pickles.front())));
      continue;
    }
    for (const auto& [file, which] : values.holders) {
      const std::string name = item + ".rank_" + std::to_string(catalog_.files[file].writer) + "." + own;
      TRY(add_pickled(name, {name}, file, values.pickles[which]));
    }
  }
  return {};
}

// Adds the tensors of an item that the metadata do not describe: once if their checksums are equal on all ranks,
// otherwise one for each rank.
Status StepReader::add_own_tensors(const std::string& item, const std::vector<Content>& contents) {
  std::map<std::string_view, std::vector<std::pair<std::uint32_t, const TensorFile::Entry*>>> by_name;
  for (const Content& content : contents)
    for (const auto& [name, entry] : content.tensors) by_name[name].emplace_back(*content.file, entry);
  for (const auto& [own, entries] : by_name) {
    const StoredTensor& first = entries.front().second->tensor;
    bool is_shared = entries.size() == 1 || first.crc.has_value();
    for (const auto& [file, entry] : entries) {
      if (entry->distributed)
        return unsupported(catalog_.file_path(file) + ": " + tensor_text(own) + ": is one rank's part, and " +
                           std::string(kMetadataFile) + " has no item '" + printable(item) + "'");
      is_shared = is_shared && entry->tensor.crc == first.crc && entry->tensor.box == first.box &&
                  entry->tensor.strides == first.strides && entry->tensor.start == first.start;
    }
    for (const auto& [file, entry] : entries) {
      const std::string rank = is_shared ? "" : ".rank_" + std::to_string(catalog_.files[file].writer);
      const std::string name = item + rank + "." + std::string(own);
      TRY(add_tensor(name, {name}, file, entry->tensor));
      if (is_shared) break;
    }
  }
  return {};
}

Status StepReader::read_others(const PathSnapshot& directory, const OpenOptions& options) {
  std::map<std::string, std::map<Index, std::string>> items;
  for (const DirectoryEntry& e : directory.entries()) {
    const auto file = e.is_directory ? std::nullopt : parse_rank_file(e.name);
    if (!file || files_of_items_.contains(e.name)) continue;
    if (file->extension == ".json")
      catalog_.metadata_files.push_back(e.name);
    else if (file->extension != ".pt" || file->rank >= metadata_.world_size || metadata_.items.contains(file->item))
      catalog_.stale_files.push_back(e.name);
    else
      items[file->item].emplace(file->rank, e.name);
  }
  for (const auto& [item, files] : items) {
    std::vector<Content> contents;
    for (const auto& [rank, name] : files) contents.push_back(TRY(read_file(item, name, rank, options)));
    TRY(add_own_tensors(item, contents));
  }
  return {};
}

void StepReader::describe_format() {
  std::vector<std::string> items;
  const DeviceMesh* mesh = nullptr;  // the mesh with the most axes
  for (const auto& [name, item] : metadata_.items) {
    items.push_back(printable(name));
    for (const ItemTensor& t : item.tensors)
      if (const DeviceMesh* m = t.holdings.front().mesh.get();
          !m->names.empty() && (!mesh || m->sizes.size() > mesh->sizes.size()))
        mesh = m;
  }
  catalog_.attributes.emplace_back("format", "torch_checkpointing, files of " + count_of(metadata_.world_size, "rank") +
                                                 ": " + reshard::join(items, ", "));
  if (mesh && mesh->names.size() == mesh->sizes.size()) {
    std::vector<std::string> axes;
    for (std::size_t i = 0; i < mesh->sizes.size(); ++i)
      axes.push_back(printable(mesh->names[i]) + "=" + std::to_string(mesh->sizes[i]));
    catalog_.attributes.emplace_back("mesh", reshard::join(axes, ", "));
  }
  if (!unknown_.empty())
    catalog_.warnings.push_back("In the files but not in " + std::string(kMetadataFile) + ": " +
                                names_text({unknown_.begin(), unknown_.end()}, "tensor") + ". Not read.");
  if (!left_out_.empty())
    catalog_.warnings.push_back("Not read, because they are not plain data: " +
                                names_text({left_out_.begin(), left_out_.end()}, "object"));
}

Status StepReader::open(const PathSnapshot& place, const OpenOptions& options) {
  const PathSnapshot& directory = *TRY(place.directory());
  catalog_.root = directory.path();
  TRY(check_finished(directory));
  const std::string file = path_join(catalog_.root, kMetadataFile);
  metadata_ = TRY(parse_metadata(TRY(read_whole_file(file, kMaxMetadataBytes)), file));
  catalog_.metadata_files.emplace_back(kMetadataFile);
  for (const auto& [name, item] : metadata_.items) TRY(read_item(name, item, options));
  TRY(read_others(directory, options));
  TRY(finish_values());
  describe_format();
  return finish(options);
}

}  // namespace

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<StepReader>(place, options);
}

}  // namespace reshard::torch_checkpointing

// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <set>

#include "formats/encoding/safetensors_header.h"
#include "formats/encoding/weight_index.h"
#include "formats/encoding/zstd_frame.h"
#include "formats/hf/hf.h"
#include "formats/tensor_files/indexed_files.h"
#include "formats/tensor_files/joined_tensor.h"
#include "formats/tensor_files/placeholders.h"
#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/names.h"
#include "lib/base/storage/read_ahead.h"
#include "lib/base/text.h"

namespace reshard::hf {
namespace {

constexpr std::string_view kShardingInfo = "DCP_SHARDING_INFO";
constexpr std::string_view kShardsConfig = ".hf_metadata/config.json";  // NeMo AutoModel's, next to its tokenizer
constexpr std::string_view kSpoolName = "(decoded frames)";
constexpr std::string_view kFileEnd = ".safetensors";

// ---- Which files there are

// The files to read.
struct Sources {
  std::string root;
  std::vector<std::string> files;  // relative to root
  std::vector<std::string> stale_files = {};
  std::vector<std::string> not_of_model = {};  // files of tensors that are not part of the model
  std::string whole = {};                      // "model.safetensors" next to an index that does not name it
  std::optional<Error> gap = {};               // the names of files without an index show that one is missing
  std::optional<IndexedFiles> index = {};
};

constexpr std::string_view kAdapter = "adapter_model.safetensors";

// Returns whether a file next to a model's files is not part of it: Mistral's second copy of the model, which has names
// of its own (docs/formats/meta.md), or an adapter (peft/utils/save_and_load.py).
bool is_other_model_file(std::string_view name) { return name.starts_with("consolidated") || name == kAdapter; }

Result<Sources> indexed_sources(const PathSnapshot& directory, const std::string& index_name) {
  Sources sources;
  sources.root = directory.path();
  sources.index = TRY(IndexedFiles::open(sources.root, index_name));
  sources.files = sources.index->files();
  const WeightIndexName name = *parse_weight_index_name(index_name, kFileEnd);
  for (const DirectoryEntry& entry : directory.entries()) {
    if (entry.is_directory || !is_file_name(entry.name) || sources.index->contains(entry.name)) continue;
    if (entry.name == name.stem + std::string(kFileEnd) && name.variant.empty()) {
      sources.whole = entry.name;
      continue;
    }
    const bool is_other = is_other_model_file(entry.name) || is_variant_name(entry.name, name.stem, kFileEnd) ||
                          (!name.variant.empty() && entry.name.starts_with(name.stem));
    (is_other ? sources.not_of_model : sources.stale_files).push_back(entry.name);
  }
  return sources;
}

// The parsed name "model-00002-of-00004.safetensors".
struct ShardFileName {
  std::string prefix;  // "model-"
  Index i = 0;
  Index n = 0;
  std::size_t width = 0;
};

std::optional<ShardFileName> parse_numbered(std::string_view name) {
  name.remove_suffix(std::string_view(".safetensors").size());
  const std::size_t of = name.rfind("-of-");
  if (of == std::string_view::npos) return std::nullopt;
  const std::string_view n = name.substr(of + 4);
  const std::size_t dash = name.substr(0, of).rfind('-');
  if (dash == std::string_view::npos) return std::nullopt;
  const std::string_view i = name.substr(dash + 1, of - dash - 1);
  ShardFileName out{std::string(name.substr(0, dash + 1)), 0, 0, i.size()};
  out.i = parse_number(i).value_or(0);
  out.n = parse_number(n).value_or(0);
  return out.i > 0 && out.n > 0 ? std::optional(out) : std::nullopt;
}

// Fails if the numbers in the names show that a file is missing, which is the only sign without an index. Distributed
// Checkpoint numbers the parts of each rank ("shard-..."), and a rank writes no file if it has nothing to store.
Status check_numbers(const std::string& root, const std::vector<std::string>& names) {
  std::map<std::pair<std::string, Index>, std::pair<Index, std::size_t>> next;  // by prefix and n: next i, width
  const auto missing = [&](const std::string& prefix, Index i, Index n, std::size_t width) {
    const auto digits = [&](Index v) {
      const std::string text = std::to_string(v);
      return std::string(width - std::min(width, text.size()), '0') + text;
    };
    return io_error(path_join(root, prefix + digits(i) + "-of-" + digits(n) + ".safetensors") +
                    ": file is missing, and there is no index; open a single file to see what it contains");
  };
  for (const std::string& name : names) {
    const auto numbered = parse_numbered(name);
    if (!numbered || name.starts_with("shard-")) continue;
    auto& [i, width] = next.try_emplace({numbered->prefix, numbered->n}, 1, numbered->width).first->second;
    if (numbered->i != i) return missing(numbered->prefix, i, numbered->n, width);
    ++i;
  }
  for (const auto& [set, at_number] : next)
    if (at_number.first <= set.second) return missing(set.first, at_number.first, set.second, at_number.second);
  return {};
}

Result<Sources> directory_sources(const PathSnapshot& directory) {
  const std::string& root = directory.path();
  std::vector<std::string> indexes, files, not_of_model;
  for (const DirectoryEntry& entry : directory.entries()) {
    if (entry.is_directory) continue;
    if (is_index_name(entry.name) && !is_other_model_file(entry.name)) indexes.push_back(entry.name);
    if (is_file_name(entry.name)) (is_other_model_file(entry.name) ? not_of_model : files).push_back(entry.name);
  }
  if (files.empty()) files.swap(not_of_model);  // an adapter without a model
  constexpr std::string_view kUsual = "model.safetensors.index.json";
  if (std::find(indexes.begin(), indexes.end(), kUsual) != indexes.end())
    return indexed_sources(directory, std::string(kUsual));
  const std::set<std::string> all(files.begin(), files.end());
  const bool has_model = std::any_of(indexes.begin(), indexes.end(), [&](const std::string& name) {
    return all.contains(parse_weight_index_name(name, kFileEnd)->stem + std::string(kFileEnd));
  });
  const std::string index = TRY(index_of_model(root, indexes, kFileEnd, has_model));
  if (!index.empty()) return indexed_sources(directory, index);
  if (files.empty()) return io_error(root + ": expected safetensors files, got none");
  const auto move_out = [&](std::vector<std::string>& to, const auto& is_other) {
    const auto others = std::stable_partition(files.begin(), files.end(), std::not_fn(is_other));
    to.insert(to.end(), others, files.end());
    files.erase(others, files.end());
  };
  move_out(not_of_model, [&](const std::string& name) {
    for (std::size_t dot = 0; (dot = name.find('.', dot + 1)) != std::string::npos;)
      if (const std::string stem = name.substr(0, dot);
          is_variant_name(name, stem, kFileEnd) && all.contains(stem + std::string(kFileEnd)))
        return true;
    return false;
  });
  // Loaders prefer the single file with the whole model.
  std::vector<std::string> stale;
  move_out(stale, [&](const std::string& name) {
    const auto numbered = parse_numbered(name);
    return numbered && all.contains(numbered->prefix.substr(0, numbered->prefix.size() - 1) + std::string(kFileEnd));
  });
  Sources sources{root, std::move(files), std::move(stale), std::move(not_of_model)};
  if (const Status complete = check_numbers(root, sources.files); !complete) sources.gap = complete.error();
  return sources;
}

Result<Sources> find_sources(const PathSnapshot& place) {
  if (place.is_directory()) return directory_sources(place);
  if (is_index_name(place.path())) return indexed_sources(*TRY(place.parent()), place.name());
  return Sources{parent_path(place.path()), {place.name()}};
}

// ---- Contents of the files

class HfReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);
  Status locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) override;

 private:
  // A box of a tensor, from one header.
  struct Piece {
    std::string tensor;
    Dims origin;
    SafetensorsEntry entry;  // without its name
  };

  // A file's size, its header, and the DCP_SHARDING_INFO in that.
  struct FileHead {
    Index size = 0;
    SafetensorsHeader header;
    Json sharding;
  };

  Result<FileHead> read_head(const std::string& path, const OpenOptions& options);
  Status read_file(const std::string& name, const OpenOptions& options);
  static Status place(Piece& piece, const Json& sharding);
  Status add(Piece piece);
  Status join(Tensor& tensor, const Piece& piece) const;
  Status add_aliases(const SafetensorsMetadata& metadata);
  Status check_shapes() const;
  void drop_aliases();
  bool has_shards() const;
  void describe_format();
  Status describe_delta();

  Sources sources_;
  std::vector<bool> sharded_;  // for each file, whether it has DCP_SHARDING_INFO
  std::string hints_;          // __metadata__ of the first file that has any
  // Of a published delta: its decoded frames, which have no name on disk.
  std::shared_ptr<const File> spool_;
  std::uint32_t spool_file_ = 0;
  bool has_spool_ = false;  // in the list of files
  Index spooled_ = 0;
};

Fragment fragment_of(const Dims& origin, const SafetensorsEntry& entry, std::uint32_t file) {
  return dense_fragment({origin, entry.shape}, {file, entry.offset, entry.length});
}

std::string hints_of(const SafetensorsMetadata& metadata) {
  constexpr std::size_t kLongest = 100;
  std::vector<std::string> hints;
  for (const auto& [key, value] : metadata)
    if (key != kShardingInfo && hints.size() < 8)
      hints.push_back(printable(key.substr(0, kLongest)) + ": " + printable(value.substr(0, kLongest)));
  return join(hints, ", ");
}

// Returns DCP_SHARDING_INFO as JSON, or null if the file has none.
Result<Json> sharding_of(const SafetensorsHeader& header, const std::string& path) {
  for (const auto& [key, value] : header.metadata) {
    if (key != kShardingInfo) continue;
    Json info = TRY(parse_json(value, path + ": " + std::string(kShardingInfo)));
    TRY(info.as_object().context(path + ": " + std::string(kShardingInfo)));
    return info;
  }
  return Json();
}

// Sets the tensor's name and the origin of a piece, which its file stores as a tensor.
Status HfReader::place(Piece& piece, const Json& sharding) {
  const auto offsets = TRY(sharding.get_array("saved_offsets"));
  const Dims& shape = piece.entry.shape;
  if (offsets.size() != static_cast<std::size_t>(shape.rank()))
    return corrupt("saved_offsets: expected " + std::to_string(shape.rank()) + " numbers for shape " +
                   to_string(shape) + ", got " + std::to_string(offsets.size()));
  for (int d = 0; d < shape.rank(); ++d) {
    piece.origin[d] = TRY(offsets[d].as_index().context("saved_offsets"));
    if (piece.origin[d] < 0 || !checked_add(piece.origin[d], shape[d]))
      return corrupt("saved_offsets: " + std::to_string(piece.origin[d]) + " is out of range");
  }
  if (sharding.contains("logical_fqn")) piece.tensor = std::string(TRY(sharding.get_string("logical_fqn")));
  return {};
}

// Adds a piece to a tensor that has one already. The shape becomes the smallest that holds all pieces.
Status HfReader::join(Tensor& tensor, const Piece& piece) const {
  const std::uint32_t file = static_cast<std::uint32_t>(catalog_.files.size() - 1);
  const std::uint32_t first = tensor.fragments.extent(0).file;
  const std::string what = catalog_.file_path(file) + ": " + tensor_text(tensor.name);
  if (!sharded_[file] || !sharded_[first])
    return corrupt(what + ": expected it in one file, got it in " + catalog_.file_path(first) +
                   " too; if these are different models, open one of the files by its path");
  if (piece.entry.dtype != tensor.dtype)
    return corrupt(what + ": expected " + std::string(info(tensor.dtype).safetensors_name) + " as in " +
                   catalog_.file_path(first) + ", got " + std::string(info(piece.entry.dtype).safetensors_name));
  if (piece.entry.shape.rank() != tensor.shape.rank())
    return corrupt(what + ": expected " + count_of(tensor.shape.rank(), "dimension") + " as in " +
                   catalog_.file_path(first) + ", got " + std::to_string(piece.entry.shape.rank()));
  for (int d = 0; d < tensor.shape.rank(); ++d)
    tensor.shape[d] = std::max(tensor.shape[d], piece.origin[d] + piece.entry.shape[d]);
  tensor.fragments.add(fragment_of(piece.origin, piece.entry, file));
  return {};
}

Status HfReader::add(Piece piece) {
  if (const auto there = catalog_.find(piece.tensor)) return join(catalog_.tensor(*there), piece);
  Tensor tensor;
  tensor.name = std::move(piece.tensor);
  tensor.dtype = piece.entry.dtype;
  tensor.shape = piece.entry.shape;
  for (int d = 0; d < tensor.shape.rank(); ++d) tensor.shape[d] += piece.origin[d];
  tensor.fragments = FragmentList(tensor.shape.rank());
  tensor.fragments.add(fragment_of(piece.origin, piece.entry, static_cast<std::uint32_t>(catalog_.files.size() - 1)));
  return catalog_.add(std::move(tensor));
}

// Adds the tensors that safetensors' save_model left out because another name has the same data.
Status HfReader::add_aliases(const SafetensorsMetadata& metadata) {
  for (const auto& [name, kept] : metadata) {
    const auto there = catalog_.find(kept);
    if (name == "format" || !there || catalog_.find(name)) continue;
    Tensor alias = catalog_.tensors()[*there];
    alias.name = name;
    TRY(catalog_.add(std::move(alias)));
  }
  return {};
}

Result<HfReader::FileHead> HfReader::read_head(const std::string& path, const OpenOptions& options) {
  const auto file = TRY(files_.open(path));
  FileHead head;
  head.size = TRY(file->size());
  head.header =
      TRY(read_safetensors_header(*file, options.files_too ? SafetensorsEnd::kExact : SafetensorsEnd::kUnchecked));
  head.sharding = TRY(sharding_of(head.header, path));
  return head;
}

Status HfReader::read_file(const std::string& name, const OpenOptions& options) {
  const std::string path = path_join(catalog_.root, name);
  const IoFailureWatch watch;
  auto head = read_head(path, options);
  if (!head) return leave_out(watch, head.error(), IndexedFiles::leave_out(sources_.index, name));
  SafetensorsHeader& header = head->header;
  const Json& sharding = head->sharding;
  catalog_.files.push_back({name, head->size});
  sharded_.push_back(sharding.is_object());
  if (hints_.empty()) hints_ = hints_of(header.metadata);
  add_header_metadata(header.metadata);
  if (catalog_.tensors().empty() && !sources_.index) TRY(catalog_.reserve(header.entries.size()));
  std::size_t placed = 0;
  for (SafetensorsEntry& entry : header.entries) {
    if (sources_.index && !sources_.index->is_wanted(entry.name, name, sharding.is_object())) continue;
    const Json* box = sharding.find(entry.name);
    placed += box != nullptr;
    Piece piece{std::move(entry.name), Dims::filled(entry.shape.rank(), 0), std::move(entry)};
    if (box) TRY(place(piece, *box).context([&] { return path + ": " + tensor_text(piece.tensor); }));
    TRY(add(std::move(piece)));
  }
  if (!sources_.index) TRY(add_aliases(header.metadata));
  if (placed < sharding.size())
    return corrupt(path + ": " + std::string(kShardingInfo) + ": expected entries for tensors of this file, got " +
                   count_of(sharding.size() - placed, "other entry"));
  return {};
}

// Fails if a shape that was joined from pieces is too large.
Status HfReader::check_shapes() const {
  for (const Tensor& tensor : catalog_.tensors()) {
    TRY(check_size(tensor.dtype, tensor.shape).context(catalog_.root + ": " + tensor_text(tensor.name)));
  }
  return {};
}

// Drops the entries that are the names of one tensor (add_aliases).
void HfReader::drop_aliases() {
  std::erase_if(catalog_.header_metadata, [&](const auto& entry) { return catalog_.find(entry.second).has_value(); });
}

// Returns whether the files have the names of shards that DCP writes.
bool HfReader::has_shards() const {
  return std::any_of(sources_.files.begin(), sources_.files.end(),
                     [](const std::string& name) { return name.starts_with("shard-"); });
}

void HfReader::describe_format() {
  const bool sharded = std::find(sharded_.begin(), sharded_.end(), true) != sharded_.end();
  // A single process with save_distributed=False uses the same metadata for whole tensors.
  if (sharded && has_shards())
    catalog_.warnings.push_back(catalog_.shape_doubt =
                                    "These shards do not record the shapes of whole tensors: if the last shard of a "
                                    "tensor is missing, the tensor looks smaller, and the files do not show it.");
  catalog_.attributes.emplace_back(
      "format", "Hugging Face safetensors, " + count_of(std::ssize(catalog_.files), "file") +
                    (sources_.index ? ", index" : "") + (sharded ? ", Distributed Checkpoint shards" : ""));
  if (!sources_.not_of_model.empty())
    catalog_.attributes.emplace_back("next to it",
                                     names_text(sources_.not_of_model, "file") + ", not part of the model");
  if (std::find(sources_.not_of_model.begin(), sources_.not_of_model.end(), kAdapter) != sources_.not_of_model.end())
    catalog_.notes.push_back(std::string(kAdapter) +
                             " is next to the model and is not read: it is an adapter, which some loaders apply " +
                             "if they find it; the files do not tell whether it is merged already");
  if (!sources_.whole.empty())
    catalog_.warnings.push_back(sources_.whole + " is not named by the index next to it and is not read: " +
                                "transformers loads it instead of the files of the index. Remove one of the two.");
  if (!hints_.empty()) catalog_.attributes.emplace_back("metadata", hints_);
}

// Makes each tensor of a published delta that of the decoded bytes, which locate() finds.
Status HfReader::describe_delta() {
  constexpr std::size_t kStart = 18;  // bytes of a frame that tell its content's size
  std::string base;
  for (const auto& [key, value] : sources_.index->index().delta()) {
    catalog_.attributes.emplace_back(key, printable(value));
    if (key == "base_version") base = printable(value);
  }
  catalog_.delta_of = "version " + base;
  catalog_.has_other_bytes = true;  // the frames, once they are decoded
  for (Tensor& tensor : catalog_.own_tensors()) {
    const Extent extent = tensor.fragments.extent(0);
    const auto file = TRY(files_.open(catalog_.file_path(extent.file)));
    const std::string what = at(file->path(), extent.offset) + ": " + tensor_text(tensor.name);
    if (tensor.dtype != DType::kUint8 || tensor.shape.rank() != 1 || tensor.fragments.size() != 1)
      return corrupt(what + ": expected U8 with one dimension, as published deltas have, got " +
                     std::string(info(tensor.dtype).safetensors_name) + " " + to_string(tensor.shape));
    std::array<std::byte, kStart> start;
    const MutableBytes read(start.data(), std::min(kStart, static_cast<std::size_t>(extent.length)));
    TRY(file->read_at(extent.offset, read));
    const Index bytes = zstd::content_bytes(read);
    if (bytes < 0) return corrupt(what + ": expected a zstd frame with a content size");
    tensor.shape = {bytes};
    tensor.located = false;
    tensor.fragments = FragmentList(1);
    tensor.fragments.add(dense_fragment(whole(tensor.shape), extent));
  }
  return {};
}

Status HfReader::locate(const std::vector<std::size_t>& tensors, int /*threads*/, const std::string& spool) {
  if (catalog_.delta_of.empty()) return {};
  if (!has_spool_) {
    spool_file_ = static_cast<std::uint32_t>(catalog_.files.size());
    catalog_.files.push_back({std::string(kSpoolName), 0});
    has_spool_ = true;
  }
  for (const std::size_t i : tensors) {
    if (catalog_.tensors()[i].located) continue;
    Tensor& tensor = catalog_.tensor(i);
    const Extent frame = tensor.fragments.extent(0);
    const Index bytes = tensor.bytes();
    if (const Index free = TRY(free_space(spool)); bytes > free)
      return io_error(spool + ": decoding " + tensor_text(tensor.name) + " needs " + human_bytes(bytes) +
                      " there, and " + human_bytes(free) + " are free");
    if (!spool_) {
      files_.pin(catalog_.file_path(spool_file_), TRY(File::create_anonymous(spool)));
      spool_ = TRY(files_.open(catalog_.file_path(spool_file_)));
    }
    const auto file = TRY(files_.open(catalog_.file_path(frame.file)));
    const Index length = TRY(zstd::decode(*file, frame.offset, frame.length, bytes, *spool_, spooled_));
    if (length != bytes)
      return corrupt(at(file->path(), frame.offset) + ": " + tensor_text(tensor.name) + ": expected " +
                     count_of(bytes, "byte") + ", as the frame says, got " + with_commas(length));
    tensor.fragments = FragmentList(1);
    tensor.fragments.add(dense_fragment(whole(tensor.shape), {spool_file_, spooled_, bytes}));
    tensor.located = true;
    catalog_.files[spool_file_].size = spooled_ += bytes;
  }
  return {};
}

Status HfReader::open(const PathSnapshot& place, const OpenOptions& options) {
  const IoFailureWatch watch;
  sources_ = TRY(find_sources(place));
  if (sources_.gap) TRY(leave_out(watch, *sources_.gap));
  catalog_.root = sources_.root;
  catalog_.stale_files = sources_.stale_files;
  if (sources_.index) TRY(catalog_.reserve(sources_.index->tensors()));
  ReadAhead headers;
  headers.fetch(starts_of(catalog_.root, sources_.files));
  for (const std::string& name : sources_.files) TRY(read_file(name, options));
  TRY(refuse_placeholders(catalog_, place));
  TRY(check_shapes());
  if (sources_.index) {
    std::vector<std::string> unnamed = sources_.stale_files;
    if (!sources_.whole.empty()) unnamed.push_back(sources_.whole);
    TRY(check_index(*sources_.index, unnamed));
  }
  if (has_shards() && TRY(path_exists(path_join(catalog_.root, kShardsConfig))))
    catalog_.metadata_files.emplace_back(kShardsConfig);
  drop_aliases();
  describe_format();
  if (sources_.index && !sources_.index->index().delta().empty()) TRY(describe_delta());
  sources_ = {};  // frees the index, which is as large as the catalog
  return finish(options);
}

}  // namespace

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<HfReader>(place, options);
}

}  // namespace reshard::hf

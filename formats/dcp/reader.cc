// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <optional>

#include "formats/dcp/dcp.h"
#include "formats/dcp/metadata.h"
#include "formats/dcp/stored_rows.h"
#include "formats/encoding/safetensors_header.h"
#include "formats/encoding/torch_archive.h"
#include "formats/encoding/zip.h"
#include "formats/encoding/zstd_frame.h"
#include "lib/base/io_failure_watch.h"
#include "lib/base/memory_limit.h"
#include "lib/base/parallel.h"
#include "lib/base/storage/read_ahead.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"

namespace reshard::dcp {
namespace {

constexpr Index kMaxMetadataBytes = (Index{1} << 30) - 1;
constexpr Index kMaxBlobBytes = Index{1} << 30;
// The largest decoded object. zstd can decode 30 kB to 1 GiB, but trainers do not save objects near that size.
constexpr Index kSmallBlobBytes = Index{16} << 20;
constexpr Index kMaxBlobRatio = 1024;
constexpr Index kArchiveOverhead = Index{1} << 20;  // an upper bound of an item's bytes besides its tensor
constexpr Index kMaxCompared = Index{1} << 20;      // the largest object, in bytes, that is compared between ranks
constexpr Index kMaxComparedInAll = Index{256} << 20;
constexpr std::string_view kSpoolName = "(decoded items)";
const std::string kOwnState = "extra_state";  // prefix of the names of objects that differ between ranks

class DcpReader : public Reader {
 public:
  Status open(const PathSnapshot& directory, const OpenOptions& options);
  Status locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) override;
  Result<std::string> blob_bytes(const Blob& blob) override;
  std::string describe(const Blob& blob) override;

 private:
  Status read_metadata(const std::vector<DirectoryEntry>& entries);
  static Result<bool> read_plain(const std::string& path, Catalog& catalog, WriterFacts& facts);
  Result<WriterFacts> read_any(const std::vector<std::string>& names);
  Status look_at_files(const std::vector<DirectoryEntry>& entries);
  Status name_objects_of_ranks();
  Result<bool> stored_as_safetensors();
  std::size_t fetch_ends_of_items(const std::vector<std::size_t>& tensors, std::size_t begin, ReadAhead& ahead);
  Status locate_tensor(Tensor& tensor, const std::string& spool);
  Result<Fragment> locate_item(const Tensor& tensor, const Fragment& item, DType& dtype, const std::string& spool);
  Result<Fragment> locate_in_blob(const Tensor& tensor, const Fragment& item, const File& file, DType& dtype);
  Result<Extent> decode(const Extent& item, Index limit, const std::string& spool);
  Result<std::string> magic(const File& file, const Extent& item) const;

  // With SAFETENSORS: headers of blobs, by file and offset.
  using BlobHeaders = std::map<std::pair<std::uint32_t, Index>, std::shared_ptr<const SafetensorsHeader>>;
  BlobHeaders headers_;
  std::mutex mutex_;  // guards headers_ and the spool
  Index spooled_ = 0;
  std::shared_ptr<const File> spool_;
  std::uint32_t spool_file_ = 0;
};

Status DcpReader::open(const PathSnapshot& directory, const OpenOptions& options) {
  catalog_.root = directory.path();
  const std::vector<DirectoryEntry>& entries = directory.entries();
  TRY(read_metadata(entries));
  TRY(look_at_files(entries));
  TRY(name_objects_of_ranks());
  catalog_.sort_by_name();
  // With SAFETENSORS, all chunks of a file are recorded at the offset of the blob that holds them.
  const Status disjoint = check_extents_disjoint(catalog_, SharedExtents::kRefused);
  catalog_.shares_extents = !disjoint && TRY(stored_as_safetensors());
  if (!options.validated) return {};
  TRY(validate(catalog_, options.files_too));
  return catalog_.shares_extents ? Status() : disjoint;
}

Result<bool> DcpReader::stored_as_safetensors() {
  for (const Tensor& t : catalog_.tensors()) {
    if (t.fragments.empty() || t.fragments.extent(0).length == 0) continue;
    std::string head(zip::kMagic);
    TRY(look_if_possible([&]() -> Status {
      const auto file = TRY(files_.open(catalog_.file_path(t.fragments.extent(0).file)));
      head = TRY(magic(*file, t.fragments.extent(0)));
      return {};
    }));
    return head != zip::kMagic && head != zstd::kMagic;
  }
  return false;
}

Status DcpReader::read_metadata(const std::vector<DirectoryEntry>& entries) {
  // Web servers do not list names that begin with a dot.
  const auto has = [&](std::string_view name) -> Result<bool> {
    if (is_url(catalog_.root)) return TRY(entry_at(path_join(catalog_.root, name))).has_value();
    return std::any_of(entries.begin(), entries.end(), [&](const DirectoryEntry& e) { return e.name == name; });
  };
  std::vector<std::string> names;
  std::string how = "PyTorch DCP";
  if (TRY(has(kMetadataFile))) {
    names = {std::string(kMetadataFile)};
  } else if (TRY(has(kUnfinishedMetadata))) {
    names = {std::string(kUnfinishedMetadata)};
    catalog_.warnings.emplace_back(
        ".metadata is missing, but .metadata.tmp is complete: the save died just before its last rename. It is used; "
        "renaming it to .metadata repairs the checkpoint.");
  } else {
    for (const DirectoryEntry& e : entries)
      if (is_rank_metadata(e.name)) names.push_back(e.name);
    std::sort(names.begin(), names.end(), natural_less);
    how += ", " + count_of(std::ssize(names), "rank") + " saved on their own";
  }
  if (names.empty())
    return corrupt(catalog_.root + ": .metadata is missing: the save did not finish, and without it the content of " +
                   "the .distcp files is unknown");
  catalog_.metadata_files = names;
  // A single pickle is usually simple enough to be read with rows. If it is not, or if something is wrong, read it
  // without them, which gives the better error.
  WriterFacts facts;
  Catalog plain = catalog_;
  if (names.size() == 1 && TRY(read_plain(path_join(catalog_.root, names[0]), plain, facts)))
    catalog_ = std::move(plain);
  else
    facts = TRY(read_any(names));
  catalog_.attributes.emplace_back("format", how);
  if (!facts.torch.empty()) catalog_.attributes.emplace_back("torch", facts.torch);
  if (!facts.python.empty()) catalog_.attributes.emplace_back("python", facts.python);
  return {};
}

Result<bool> DcpReader::read_plain(const std::string& path, Catalog& catalog, WriterFacts& facts) {
  const File file = TRY(File::open(path));
  // The boxes and extents that are kept take about half of that.
  TRY(may_take(TRY(file.size()) / 2, [&] { return path; }));
  std::optional<StoredRows> rows(std::in_place);
  std::optional<MetadataReader> reader;
  Status done;
  {
    auto document = pickle::parse_records(file, *rows);
    if (!document && document.error().code() == ErrorCode::kIo) return std::move(document).error();
    if (!document) return false;
    reader.emplace(catalog, &*rows);
    done = reader->add(*document, path);
  }
  rows.reset();
  if (done) done = reader->finish();
  if (!done && done.error().code() == ErrorCode::kUsage) return std::move(done).error();
  facts = reader->facts();
  return done.has_value();
}

Result<WriterFacts> DcpReader::read_any(const std::vector<std::string>& names) {
  MetadataReader reader(catalog_);
  for (const std::string& name : names) {
    const std::string path = path_join(catalog_.root, name);
    std::string bytes = TRY(read_whole_file(path, kMaxMetadataBytes));
    const pickle::Document document = TRY(pickle::parse(std::move(bytes), path));
    TRY(reader.add(document, path));
  }
  TRY(reader.finish());
  return reader.facts();
}

Status DcpReader::look_at_files(const std::vector<DirectoryEntry>& entries) {
  std::unordered_map<std::string_view, const DirectoryEntry*> by_name;
  for (const DirectoryEntry& e : entries) by_name.emplace(e.name, &e);
  std::unordered_map<std::string_view, bool> used;
  for (CatalogFile& file : catalog_.files) {
    used.emplace(file.path, true);
    if (const auto it = by_name.find(file.path); it != by_name.end() && !it->second->is_directory) {
      file.size = it->second->size;
      continue;
    }
    if (file.path.find('/') == std::string::npos) continue;
    const auto deep = TRY(entry_at(path_join(catalog_.root, file.path)));
    if (deep && !deep->is_directory) file.size = deep->size;
  }
  std::vector<CatalogFile> idle;  // empty files, of ranks that wrote nothing; they show the number of ranks
  for (const DirectoryEntry& e : entries) {
    if (e.is_directory || !e.name.ends_with(kDataEnding) || used.contains(e.name)) continue;
    if (e.size > 0)
      catalog_.stale_files.push_back(e.name);
    else if (e.name.starts_with("__"))
      idle.push_back({e.name, 0, rank_of_file(e.name)});
  }
  catalog_.files.insert(catalog_.files.end(), idle.begin(), idle.end());
  return {};
}

// Finds objects that differ between ranks. Ranks that save on their own each write all objects, and some have their own
// value under a shared name: a seed, the state of a data loader. The first rank's value keeps the name. If the files
// are missing, only lengths are compared.
Status DcpReader::name_objects_of_ranks() {
  Index left = kMaxComparedInAll;
  const auto stored = [&](const Extent& e) -> Result<std::optional<std::string>> {
    std::optional<std::string> out;
    if (e.length > kMaxCompared || e.length > left || catalog_.files[e.file].size < e.offset + e.length) return out;
    left -= e.length;
    TRY(look_if_possible([&]() -> Status {
      const auto file = TRY(files_.open(catalog_.file_path(e.file)));
      std::string bytes(e.length, '\0');
      TRY(file->read_at(e.offset, {reinterpret_cast<std::byte*>(bytes.data()), bytes.size()}));
      out = std::move(bytes);
      return {};
    }));
    return out;
  };
  std::vector<Blob> others;
  for (Blob& blob : catalog_.blobs) {
    if (blob.copies.empty()) continue;
    const auto first = TRY(stored(blob.extent));
    std::vector<Extent> equal;
    for (const Extent& copy : blob.copies) {
      const bool is_there = catalog_.files[blob.extent.file].size >= 0 && catalog_.files[copy.file].size >= 0;
      if (copy.length == blob.extent.length && (!is_there || (first && TRY(stored(copy)) == first))) {
        equal.push_back(copy);
        continue;
      }
      const Index writer = catalog_.files[copy.file].writer;
      if (writer < 0 || writer == catalog_.files[blob.extent.file].writer) continue;  // not a rank's own value
      Blob own{kOwnState + ".rank_" + std::to_string(writer) + "." + blob.name, copy, {}};
      own.path = {kOwnState, "rank_" + std::to_string(writer)};
      if (blob.path.empty())
        own.path.emplace_back(blob.name);
      else
        own.path.insert(own.path.end(), blob.path.begin(), blob.path.end());
      others.push_back(std::move(own));
    }
    blob.copies = std::move(equal);
  }
  std::move(others.begin(), others.end(), std::back_inserter(catalog_.blobs));
  return {};
}

Result<std::string> DcpReader::magic(const File& file, const Extent& item) const {
  std::string bytes(std::min<Index>(4, item.length), '\0');
  TRY(file.read_at(item.offset, {reinterpret_cast<std::byte*>(bytes.data()), bytes.size()}));
  return bytes;
}

Status DcpReader::locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) {
  // Add a file for decoded items before threads read the list of files. It is removed again if nothing needs it.
  const bool is_first = !spool_;
  if (is_first) {
    spool_file_ = static_cast<std::uint32_t>(catalog_.files.size());
    catalog_.files.push_back({std::string(kSpoolName), 0});
  }
  files_.expect(File::Reads::kScattered);  // only the first and last bytes of every item are read
  std::vector<Tensor>& own = catalog_.own_tensors();
  Status status;
  for (std::size_t begin = 0; status && begin < tensors.size();) {
    ReadAhead ahead;
    const std::size_t end = fetch_ends_of_items(tensors, begin, ahead);
    status = parallel_for(end - begin, thread_count(threads), [&](int, Index i) {
      return locate_tensor(own[tensors[begin + static_cast<std::size_t>(i)]], spool);
    });
    begin = end;
  }
  files_.expect(File::Reads::kInOrder);
  if (is_first && !spool_) catalog_.files.pop_back();
  return status;
}

// Fetches ahead, for a source behind a URL, the bytes that zip.h reads of the items of some tensors, from `begin` on.
// Returns the first tensor that it has not requested; for a local path it requests nothing and returns the end.
std::size_t DcpReader::fetch_ends_of_items(const std::vector<std::size_t>& tensors, std::size_t begin,
                                           ReadAhead& ahead) {
  if (!is_url(catalog_.root)) return tensors.size();
  constexpr std::size_t kMostItems = 256;  // as gaps of 64 KiB may be fetched with each
  constexpr Index kEnd = Index{4} << 10, kSmall = 4 * kEnd;
  std::vector<FileRange> ranges;
  std::size_t end = begin, items = 0;
  for (; end < tensors.size() && items < kMostItems; ++end) {
    const Tensor& tensor = catalog_.tensors()[tensors[end]];
    for (const FragmentList* const list : {&tensor.fragments, &tensor.replicas})
      for (std::size_t i = 0; !tensor.located && i < list->size(); ++i, ++items) {
        const Extent item = list->extent(i);
        const std::string path = catalog_.file_path(item.file);
        const Index head = item.length <= kSmall ? item.length : kEnd;
        ranges.push_back({path, item.offset, head});
        if (head < item.length) ranges.push_back({path, item.offset + item.length - kEnd, kEnd});
      }
  }
  ahead.fetch(ranges);
  return end;
}

Status DcpReader::locate_tensor(Tensor& tensor, const std::string& spool) {
  if (tensor.located) return {};
  std::optional<DType> dtype;
  // Changes all extents or none, even if memory runs out: the extent of a located item is no longer the item's.
  FragmentList fragments = tensor.fragments, replicas = tensor.replicas;
  for (FragmentList* const list : {&fragments, &replicas}) {
    for (std::size_t i = 0; i < list->size(); ++i) {
      const Fragment item = list->get(i);
      // The item of an empty shard has no usable shape; that of an empty tensor has its shape.
      if (item.box.empty() && (tensor.elements() > 0 || item.extent.length == 0)) continue;
      DType stored = tensor.dtype;
      auto found = locate_item(tensor, item, stored, spool);
      if (!found) return std::move(found).error().context(tensor_text(tensor.name) + " " + to_string(item.box));
      if (dtype && *dtype != stored)
        return corrupt(at(catalog_.file_path(item.extent.file), item.extent.offset) + ": " + tensor_text(tensor.name) +
                       " " + to_string(item.box) + ": expected dtype " + std::string(info(*dtype).torch_name) +
                       " as in its other shards, got " + std::string(info(stored).torch_name));
      dtype = stored;
      list->set(i, *found);
    }
    list->pack();
  }
  if (dtype && *dtype != tensor.dtype) {
    const std::lock_guard lock(mutex_);
    catalog_.warnings.push_back(tensor_text(tensor.name) + " is stored as " + std::string(info(*dtype).torch_name) +
                                ", the metadata says " + std::string(info(tensor.dtype).torch_name) +
                                "; the stored type is used");
    tensor.dtype = *dtype;
  }
  tensor.fragments = std::move(fragments);
  tensor.replicas = std::move(replicas);
  tensor.located = true;
  return {};
}

Result<Fragment> DcpReader::locate_item(const Tensor& tensor, const Fragment& item, DType& dtype,
                                        const std::string& spool) {
  auto file = TRY(files_.open(catalog_.file_path(item.extent.file)));
  std::string head = TRY(magic(*file, item.extent));
  Extent where = item.extent;
  if (head == zstd::kMagic) {
    const auto twice = checked_mul(volume(item.box) * byte_size(tensor.dtype), Index{2});
    const auto limit = twice ? checked_add(*twice, kArchiveOverhead) : std::nullopt;
    where = TRY(decode(item.extent, limit.value_or(std::numeric_limits<Index>::max()), spool));
    file = TRY(files_.open(catalog_.file_path(where.file)));
    head = TRY(magic(*file, where));
  }
  if (head != zip::kMagic) return locate_in_blob(tensor, item, *file, dtype);
  auto stored = TRY(torch_archive::read_tensor_item(*file, where.offset, where.length));
  if (stored.shape() != item.box.shape)
    return corrupt(at(file->path(), where.offset) + ": expected shape " + to_string(item.box.shape) + ", got " +
                   to_string(stored.shape()) + ": the file is from another save, or two were swapped");
  dtype = stored.dtype;
  stored.box = item.box;
  stored.extent.file = where.file;
  return Fragment(std::move(stored));
}

Result<Fragment> DcpReader::locate_in_blob(const Tensor& tensor, const Fragment& item, const File& file, DType& dtype) {
  const Index size = TRY(file.size());
  std::shared_ptr<const SafetensorsHeader> header;
  {
    const std::lock_guard lock(mutex_);
    auto& slot = headers_[{item.extent.file, item.extent.offset}];
    if (!slot) {
      auto parsed =
          read_safetensors_header(file, item.extent.offset, size - item.extent.offset, SafetensorsEnd::kWithin);
      if (!parsed)
        return corrupt(
            at(file.path(), item.extent.offset) +
            ": expected a torch.save archive, a zstd frame or a safetensors blob, got something else: the file "
            "is stale or was overwritten (" +
            parsed.error().message() + ")");
      slot = std::make_shared<const SafetensorsHeader>(std::move(*parsed));
    }
    header = slot;
  }
  for (const auto& entry : header->entries) {
    if (entry.name != tensor.name || entry.shape != item.box.shape) continue;
    dtype = entry.dtype;
    Fragment f = item;
    f.extent = {item.extent.file, entry.offset, entry.length};
    return f;
  }
  return corrupt(at(file.path(), item.extent.offset) + ": the safetensors blob has no tensor of that name and shape");
}

Result<Extent> DcpReader::decode(const Extent& item, Index limit, const std::string& spool) {
  const auto file = TRY(files_.open(catalog_.file_path(item.file)));
  const std::lock_guard lock(mutex_);
  if (!spool_) {
    files_.pin(catalog_.file_path(spool_file_), TRY(File::create_anonymous(spool)));
    spool_ = TRY(files_.open(catalog_.file_path(spool_file_)));
  }
  const Index begin = spooled_;
  spooled_ = begin + TRY(zstd::decode(*file, item.offset, item.length, limit, *spool_, begin));
  catalog_.files[spool_file_].size = spooled_;
  return Extent{spool_file_, begin, spooled_ - begin};
}

Result<std::string> DcpReader::blob_bytes(const Blob& blob) {
  if (blob.extent.length > kMaxBlobBytes)
    return unsupported("object '" + printable(blob.name) + "' takes " + human_bytes(blob.extent.length) + "; at most " +
                       human_bytes(kMaxBlobBytes) + " are supported");
  const auto file = TRY(files_.open(catalog_.file_path(blob.extent.file)));
  TRY(may_take(blob.extent.length,
               [&] { return at(file->path(), blob.extent.offset) + ": object '" + printable(blob.name) + "'"; }));
  std::string bytes(blob.extent.length, '\0');
  TRY(file->read_at(blob.extent.offset, {reinterpret_cast<std::byte*>(bytes.data()), bytes.size()}));
  if (!bytes.starts_with(zstd::kMagic)) {
    TRY(torch_archive::check_item(*file, blob.extent.offset, blob.extent.length)
            .context("object '" + printable(blob.name) + "'"));
    return bytes;
  }
  const Index limit = std::min(kMaxBlobBytes, std::max(kSmallBlobBytes, kMaxBlobRatio * blob.extent.length));
  return zstd::decode(as_bytes(bytes), limit, at(file->path(), blob.extent.offset));
}

std::string DcpReader::describe(const Blob& blob) {
  auto file = files_.open(catalog_.file_path(blob.extent.file));
  if (!file) return "";
  auto head = magic(**file, blob.extent);
  if (!head || *head != zip::kMagic) return "";
  auto document = torch_archive::read_object_item(**file, blob.extent.offset, blob.extent.length);
  return document ? pickle::print(document->root(), 2, 4) : "";
}

}  // namespace

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  const bool is_file = TRY(is_file_of_directory(place));
  return open_as<DcpReader>(is_file ? *TRY(place.parent()) : place, options);
}

}  // namespace reshard::dcp

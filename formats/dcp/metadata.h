// The `.metadata` pickle of a DCP directory, read and written.
//
//   Metadata
//     state_dict_metadata     FQN: TensorStorageMetadata(properties, size, chunks: [(offsets, sizes)])
//                             FQN: BytesStorageMetadata
//
//     planner_data            FQN: path in the nested state_dict
//
//     storage_data            MetadataIndex(fqn, offset, index): _StorageInfo(relative_path, offset, length)
//
//     storage_meta, version   of newer torch
//
// Written by: torch/distributed/checkpoint/metadata.py, filesystem.py (FileSystemWriter.finish).
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "formats/encoding/pickle.h"
#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/format.h"

namespace reshard::dcp {

class StoredRows;

// Where torch's classes live.
inline constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";
inline constexpr std::string_view kFilesystemModule = "torch.distributed.checkpoint.filesystem";

// What a metadata pickle tells of its writer.
struct WriterFacts {
  std::string torch;   // "2.4 or later"
  std::string python;  // "3.13"
};

// The rank R of a file named `__R_K.distcp`; -1 of others.
Index rank_of_file(std::string_view path);

// Reads one metadata pickle and adds its tensors and blobs to `catalog`; their extents are the stored items. Rank-local
// metadata of one save (`__R.metadata`) are added one after the other: boxes join, repeated boxes become replicas,
// objects of one name its copies, whether they are equal or not. File sizes are not looked at.
class MetadataReader {
 public:
  // `rows`: what the one pickle's chunks and storage_data were taken by when it was parsed; add() then fails where that
  // does not fit the pickle, of which parse() and a reader without rows tell more.
  explicit MetadataReader(Catalog& catalog, StoredRows* rows = nullptr) : catalog_(catalog), rows_(rows) {}
  Status add(const pickle::Document& document, const std::string& path);
  // Moves what was read into the catalog.
  Status finish();

  const WriterFacts& facts() const { return facts_; }

 private:
  struct PendingTensor {
    Tensor tensor;
    std::vector<std::uint8_t> stored;  // whether storage_data has told where fragment i lies
    // Fragments of the pickle being read, those with elements first; made when a hint was wrong.
    std::multimap<Dims, std::size_t> by_origin;
  };
  struct PendingBlob {
    Blob blob;
    bool stored = false;
  };
  struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };

  // A million objects of four classes: what is known of a class and of its field names is found once, and then
  // recognised by identity, which in one pickle is that of the shared global or string.
  class ClassCheck {
   public:
    bool is(const pickle::Value& object, bool (*matches)(const pickle::Value& object));

   private:
    std::optional<std::uint32_t> callee_;
  };
  class Fields {
   public:
    Fields(std::string_view owner, std::vector<std::string_view> names) : owner_(owner), names_(std::move(names)) {}
    // Looks at an object's state; get and find, by number of the name, are about the last one looked at.
    Status look_at(const pickle::Value& state);
    std::optional<pickle::Value> find(std::size_t name) const;
    Result<pickle::Value> get(std::size_t name) const;

   private:
    std::string_view owner_;
    std::vector<std::string_view> names_;
    std::optional<pickle::Value> state_;
    std::vector<std::uint32_t> keys_;                 // identities, in the order they have in the states
    std::vector<std::optional<std::size_t>> places_;  // of each name among them
  };
  struct Familiar {
    ClassCheck tensor, blob, chunk, index, info;
    Fields chunk_fields{"ChunkStorageMetadata", {"offsets", "sizes"}};
    Fields index_fields{"MetadataIndex", {"fqn", "index", "offset"}};
    Fields info_fields{"_StorageInfo", {"relative_path", "offset", "length", "transform_descriptors"}};
  };

  Status check_globals(const pickle::Document& document) const;
  Status add_entry(std::string_view name, const pickle::Value& entry);
  Status add_tensor(std::string_view name, const pickle::Value& state);
  Status add_storage(const pickle::Value& storage);
  Status add_rows(const pickle::Value& storage);
  Status place_blob(std::string_view name, const Extent& extent);
  Status add_paths(const pickle::Value& paths);
  Status place(PendingTensor& pending, std::size_t first, const Dims& offset, std::optional<Index> hint,
               const Extent& extent);
  // Leaves out empty boxes that are stored nowhere, and sets repeated ones aside: ranks that save on their own repeat
  // the boxes of replicated tensors.
  Status sort_out(PendingTensor& pending) const;
  Result<std::uint32_t> file_index(std::string_view relative_path);
  // Counts what is copied out of the pickle. Corrupt where it becomes far more than the pickle holds.
  Status charge(std::size_t bytes);
  void read_facts(const pickle::Document& document, const pickle::Value& state);

  Catalog& catalog_;
  StoredRows* rows_;
  std::string path_;  // of the pickle being read, for messages
  int pickles_ = 0;
  Index budget_ = 0;         // bytes that may yet be copied out of the pickle being read
  bool transforms_ = false;  // some items went through one
  WriterFacts facts_;
  std::vector<PendingTensor> tensors_;
  std::vector<PendingBlob> blobs_;
  std::vector<std::size_t> first_fragment_;  // of each tensor, in the pickle being read
  std::unordered_map<std::string, std::size_t> tensor_index_;
  std::unordered_map<std::string, std::size_t> blob_index_;
  std::unordered_map<std::string, std::uint32_t, TextHash, std::equal_to<>> files_;
  Familiar familiar_;  // of the pickle being read
};

// ---- Writing (metadata_writer.cc)

// One stored item.
struct WrittenItem {
  Box box;  // of a tensor; unused for a blob
  std::uint32_t file = 0;
  Index offset = 0;  // of the item in its file
  Index length = 0;
};

// What is written, which need not be in memory as such: a large job has millions of items.
class MetadataContents {
 public:
  struct Entry {
    std::string_view name;
    KeyPath path;                // empty: {name}
    std::optional<DType> dtype;  // nothing: a blob
    Dims shape;
  };
  using VisitItem = std::function<void(const WrittenItem& item)>;

  virtual ~MetadataContents() = default;
  virtual std::size_t entries() const = 0;
  virtual Entry entry(std::size_t e) const = 0;
  virtual void each_item(std::size_t e, const VisitItem& visit) const = 0;  // always in the same order
  virtual std::string_view file(std::uint32_t number) const = 0;            // that items name by this number
};
// A pickle (protocol 2) that every torch from 2.3 on reads, handed on in stretches of about a megabyte. Fails only
// where `emit` does.
Status write_metadata(const MetadataContents& contents, const std::function<Status(std::string_view bytes)>& emit);

}  // namespace reshard::dcp

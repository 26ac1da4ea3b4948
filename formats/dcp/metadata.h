// SPDX-License-Identifier: Apache-2.0
// Reads and writes the `.metadata` pickle of a DCP directory.
//
//   Metadata
//     state_dict_metadata     FQN: TensorStorageMetadata(properties, size, chunks: [(offsets, sizes)])
//                             FQN: BytesStorageMetadata
//
//     planner_data            FQN: path in the nested state_dict
//
//     storage_data            MetadataIndex(fqn, offset, index): _StorageInfo(relative_path, offset, length)
//
//     storage_meta, version   in newer torch
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

// What a metadata pickle reveals about its writer.
struct WriterFacts {
  std::string torch;   // "2.4 or later"
  std::string python;  // "3.13"
};

// Returns the rank R of a file named `__R_K.distcp`, or -1 for another name.
Index rank_of_file(std::string_view path);

// Reads metadata pickles and adds their tensors and blobs to a catalog; the extents are the stored items. The
// rank-local metadata of one save (`__R.metadata`) are added one after the other: their boxes are joined, repeated
// boxes become replicas, and objects with the same name become copies, whether or not they are equal. File sizes are
// not checked.
class MetadataReader {
 public:
  // `rows` (may be null) took the chunks and the storage_data of the only pickle while it was parsed. add() fails if
  // they do not fit the pickle; the caller should then use parse() and a reader without rows, which give a better
  // error.
  explicit MetadataReader(Catalog& catalog, StoredRows* rows = nullptr) : catalog_(catalog), rows_(rows) {}
  Status add(const pickle::Document& document, const std::string& path);
  // Moves the tensors and blobs into the catalog.
  Status finish();

  const WriterFacts& facts() const { return facts_; }

 private:
  struct PendingTensor {
    Tensor tensor;
    std::vector<std::uint8_t> stored;  // for each fragment, whether storage_data has given its extent
    // The fragments of the current pickle by their boxes' origins, non-empty ones first. Filled when storage_data names
    // a fragment by an index that is not its own.
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

  // There may be a million objects of four classes. The class and the field names are compared as texts once, and then
  // by identity, as all objects of a pickle share the same globals and strings.
  class ClassCheck {
   public:
    bool is(const pickle::Value& object, bool (*matches)(const pickle::Value& object));

   private:
    std::optional<std::uint32_t> callee_;
  };
  class Fields {
   public:
    Fields(std::string_view owner, std::vector<std::string_view> names) : owner_(owner), names_(std::move(names)) {}
    // Sets the object's state to which find() and get() refer. They take the index of the name.
    Status look_at(const pickle::Value& state);
    std::optional<pickle::Value> find(std::size_t name) const;
    Result<pickle::Value> get(std::size_t name) const;

   private:
    std::string_view owner_;
    std::vector<std::string_view> names_;
    std::optional<pickle::Value> state_;
    std::vector<std::uint32_t> keys_;                 // identities of the keys, in the order of the states
    std::vector<std::optional<std::size_t>> places_;  // the position of each name in `keys_`
  };
  struct KnownClasses {
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
  // Drops empty boxes that are not stored, and makes repeated boxes replicas: ranks that save on their own repeat the
  // boxes of replicated tensors.
  Status normalize_boxes(PendingTensor& pending) const;
  Result<std::uint32_t> file_index(std::string_view relative_path);
  // Counts bytes copied out of the pickle. Fails with kCorrupt if they become far more than the pickle's own.
  Status charge(std::size_t bytes);
  void read_facts(const pickle::Document& document, const pickle::Value& state);

  Catalog& catalog_;
  StoredRows* rows_;
  std::string path_;  // of the current pickle, for messages
  int pickles_ = 0;
  Index budget_ = 0;         // bytes that may still be copied out of the current pickle
  bool transforms_ = false;  // some items are transformed
  WriterFacts facts_;
  std::vector<PendingTensor> tensors_;
  std::vector<PendingBlob> blobs_;
  std::vector<std::size_t> first_fragment_;  // for each tensor, its first fragment of the current pickle
  std::unordered_map<std::string, std::size_t> tensor_index_;
  std::unordered_map<std::string, std::size_t> blob_index_;
  std::unordered_map<std::string, std::uint32_t, TextHash, std::equal_to<>> files_;
  KnownClasses familiar_;  // for the current pickle
};

// ---- Writing (metadata_writer.cc)

// One item to be stored.
struct WrittenItem {
  Box box;  // of a tensor; unused for a blob
  std::uint32_t file = 0;
  Index offset = 0;  // of the item in its file
  Index length = 0;
};

// The content of the metadata to write. It is visited rather than stored, because a large job has millions of items.
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
  virtual void each_item(std::size_t e, const VisitItem& visit) const = 0;  // in the same order on each call
  virtual std::string_view file(std::uint32_t number) const = 0;            // the path for WrittenItem::file
};
// Writes a pickle (protocol 2) that torch 2.3 and later read, and passes it to `emit` in pieces of about a megabyte.
// Fails only if `emit` fails.
Status write_metadata(const MetadataContents& contents, const std::function<Status(std::string_view bytes)>& emit);

}  // namespace reshard::dcp

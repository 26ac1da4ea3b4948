// What torch.save writes: a pickle, and the bytes of the tensors in it. There are two containers.
//
// The zip (PyTorch 1.6 and later):
//
//   archive/data.pkl     a pickle (protocol 2); a tensor in it is a call that names its bytes, and how they lie:
//                          torch._utils._rebuild_tensor_v2(('storage', torch.FloatStorage, '0', 'cpu', 6), 0, (2, 3),
//                          ...)
//   archive/byteorder    "little" or "big"; absent: little
//   archive/data/0       the bytes of storage '0'
//   archive/version      "3\n"
//
// The stream (before 1.6, or _use_new_zipfile_serialization=False): five pickles one after the other, then the storages
// without any directory, each with its number of elements in front:
//
//   +-------+------+------------------+--------+-----------------------+-------------+----------------+-----
//   | magic | 1001 | {little_endian,  | object | ['94..', '97..', ...] | u64, little | the bytes of   | ...
//   |       |      |  type_sizes ...} |        | keys of the storages  | endian: n   | storage '94..' |
//   +-------+------+------------------+--------+-----------------------+-------------+----------------+-----
//
// How wide an element is, only the storage classes in the object's references tell. Numbers and bytes of a stream are
// little-endian on every machine, whatever its little_endian says (torch/csrc/serialization.cpp, writeFileRaw).
//
// Several tensors may lie in one storage (tied weights, views), and a tensor may be a small part of its storage.
// Written by: torch/serialization.py, torch/_utils.py, torch/_tensor.py.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "formats/encoding/pickle.h"
#include "formats/encoding/stored_tensor.h"
#include "lib/base/file.h"
#include "lib/base/result.h"

namespace reshard {

inline constexpr Index kMaxTorchPickleBytes = Index{256} << 20;

// Whether a value would be a tensor once Python has run the pickle; also one of a kind that resolve() refuses.
bool makes_torch_tensor(pickle::Value value);

// A torch.save file of either container, open: its pickle, and where its storages lie. Refers to the file no longer.
class TorchFile {
 public:
  // So many first bytes of a file (or all of a shorter one) are what recognises() asks for.
  static constexpr Index kHeadBytes = 512;
  // Whether a file that begins like this was made by torch.save, in a container that is read or in one that is refused
  // with its name.
  static bool recognises(std::string_view head);

  // Reads the pickle and the directory of the storages in [offset, offset + length) of the file; no payload.
  // Unsupported, with what to do: TorchScript archives, the containers of 1.5's preview and of 0.1, pickles of more
  // than `max_pickle_bytes`, streams that hold a storage of which no tensor tells the width.
  static Result<TorchFile> open(const File& file, Index offset, Index length,
                                Index max_pickle_bytes = kMaxTorchPickleBytes);

  // The same where only a zip is right: an item of a .distcp. Saves a look at the first bytes.
  static Result<TorchFile> open_zip(const File& file, Index offset, Index length,
                                    Index max_pickle_bytes = kMaxTorchPickleBytes);

  // The whole value; valid as long as this object (which may be moved) lives.
  pickle::Value root() const { return document_.root(); }
  const pickle::Document& document() const { return document_; }
  const std::string& place() const { return place_; }  // "path@0x1f40", for messages
  pickle::Document take_document() && { return std::move(document_); }

  // The tensor that `value`, of this file, would be: a plain strided one, or one in the wrappings of a Parameter or of
  // a subclass (ColoTensor), which add nothing to its elements. Quantized, sparse, conjugated, distributed and such
  // tensors are unsupported errors that say so.
  Result<StoredTensor> resolve(pickle::Value value) const;

 private:
  struct Storage {
    Index offset = 0;  // in the file
    Index length = 0;  // bytes
    std::optional<std::uint32_t> crc;
  };
  struct Reference;

  TorchFile(std::string place, pickle::Document document) : place_(std::move(place)), document_(std::move(document)) {}
  static Result<TorchFile> open_stream(const File& file, Index offset, Index length, Index max_pickle_bytes);
  static Result<Reference> read_reference(pickle::Value value, std::string_view place);
  // Every storage that something under `root` refers to, by key.
  static Result<std::unordered_map<std::string, Reference>> references_of(pickle::Value root, std::string_view place);

  std::string place_;
  pickle::Document document_;
  std::unordered_map<std::string, Storage> storages_;  // by key
  std::string storage_text_;                           // how messages name one: "member 'archive/data/"
  bool big_endian_ = false;
};

}  // namespace reshard

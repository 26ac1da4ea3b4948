// SPDX-License-Identifier: Apache-2.0
// Files of torch.save: a pickle, and the bytes of the tensors in it. There are two containers.
//
// The zip (PyTorch 1.6 and later):
//
//   archive/data.pkl     a pickle (protocol 2); a tensor in it is a call with its storage, offset, shape and strides:
//                          torch._utils._rebuild_tensor_v2(('storage', torch.FloatStorage, '0', 'cpu', 6), 0, (2, 3),
//                          ...)
//   archive/byteorder    "little" or "big"; absent: little
//   archive/data/0       the bytes of storage '0'
//   archive/version      "3\n"
//
// The stream (before 1.6, or _use_new_zipfile_serialization=False): five pickles one after the other, then the
// storages, each preceded by its number of elements. There is no directory:
//
//   +-------+------+------------------+--------+-----------------------+-------------+----------------+-----
//   | magic | 1001 | {little_endian,  | object | ['94..', '97..', ...] | u64, little | the bytes of   | ...
//   |       |      |  type_sizes ...} |        | keys of the storages  | endian: n   | storage '94..' |
//   +-------+------+------------------+--------+-----------------------+-------------+----------------+-----
//
// The width of an element follows only from the storage classes in the object's references. Numbers and elements in a
// stream are little-endian on every machine, whatever little_endian says (torch/csrc/serialization.cpp, writeFileRaw).
//
// Several tensors may share a storage (tied weights, views), and a tensor may be a small part of its storage.
// Written by: torch/serialization.py, torch/_utils.py, torch/_tensor.py.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "formats/encoding/pickle.h"
#include "formats/encoding/stored_tensor.h"
#include "lib/base/file.h"
#include "lib/base/result.h"

namespace reshard {

inline constexpr Index kMaxTorchPickleBytes = Index{256} << 20;

// Returns whether a value would be a tensor after Python has run the pickle, even of a kind that resolve() refuses.
bool makes_torch_tensor(pickle::Value value);

// Returns dtype and shape of a tensor that a class computes from others, such as torchao's 8-bit moments. It has no
// bytes of its own. Returns nothing for all other values, and for one rank's part of a tensor.
std::optional<StoredTensor> computed_tensor(pickle::Value value);

// An open torch.save file of either container: its pickle, and the places of its storages. Does not refer to the File
// after it was opened.
class TorchFile {
 public:
  // The number of first bytes that recognises() needs, or all bytes of a shorter file.
  static constexpr Index kHeadBytes = 512;
  // Returns whether a file that begins like this was written by torch.save, in any container, including those that
  // open() refuses by name.
  static bool recognises(std::string_view head);

  // Reads the pickle and the places of the storages in [offset, offset + length) of the file, no payload. Fails with
  // kUnsupported, and says what to do, for TorchScript archives, the containers of 1.5's preview and of 0.1, pickles of
  // more than `max_pickle_bytes`, and streams with a storage whose element width no tensor gives.
  static Result<TorchFile> open(const File& file, Index offset, Index length,
                                Index max_pickle_bytes = kMaxTorchPickleBytes);

  // Does the same for a zip, such as an item of a .distcp file. Saves reading the first bytes.
  static Result<TorchFile> open_zip(const File& file, Index offset, Index length,
                                    Index max_pickle_bytes = kMaxTorchPickleBytes);

  // Returns the whole value, valid as long as this object, which may be moved.
  pickle::Value root() const { return document_.root(); }
  const pickle::Document& document() const { return document_; }
  const std::string& place() const { return place_; }  // "path@0x1f40", for messages
  pickle::Document take_document() && { return std::move(document_); }

  // Returns the tensor that `value`, a value of this file, would be: a strided tensor, also inside a Parameter or a
  // subclass that does not change its elements (ColoTensor). Fails with kUnsupported for quantized, sparse, conjugated,
  // distributed and similar tensors.
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
  // Returns every storage that a value under `root` refers to, by key.
  static Result<std::unordered_map<std::string, Reference>> references_of(pickle::Value root, std::string_view place);

  std::string place_;
  pickle::Document document_;
  std::unordered_map<std::string, Storage> storages_;  // by key
  std::string storage_text_;                           // a storage's name in messages: "member 'archive/data/"
  bool big_endian_ = false;
};

}  // namespace reshard
